"""Options and libraries that several commands share."""
