"""`mainspring verify`: proves that every accepted task is somewhere, and repairs what is not."""
