"""Credit rules: which tokens earn the main reward. One file each."""
