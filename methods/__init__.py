"""Speculative methods, one file each; installed as `specbench.methods`."""
