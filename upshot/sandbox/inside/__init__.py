"""Code that runs in the zygote and its confined children. Standard library only; nothing here trusts a program."""
