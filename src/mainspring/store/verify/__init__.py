"""`mainspring verify`: prove that every accepted task is somewhere, find orphans, and repair them."""
