"""Many nodes, one namespace: who is there, who leads, who owns what."""
