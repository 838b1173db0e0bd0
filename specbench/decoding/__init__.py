"""The draft-verify loop, acceptance rules, token trees and sampling transforms. Torch only, no I/O."""
