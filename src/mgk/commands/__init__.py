"""The commands of the command line, one file for each group. They may use every part of the library."""
