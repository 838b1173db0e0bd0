"""How a serving engine is driven: started or attached to, sent requests, and its answers made into rows."""
