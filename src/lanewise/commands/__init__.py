"""What the commands and the functions of the package do, from start to end."""
