"""Operations that only the owner of a partition performs; every write carries the owner's token."""
