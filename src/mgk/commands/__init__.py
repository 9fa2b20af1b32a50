"""What the command line does, one file for each group of commands. They may use every part of the library."""
