"""Operations that need an explicit collective over a mesh axis."""
