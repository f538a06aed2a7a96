"""Operations that have more than one implementation, and their selection."""
