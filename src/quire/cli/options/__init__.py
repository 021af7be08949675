"""Options of the command line: help by groups, names of other engines, and the settings pages."""
