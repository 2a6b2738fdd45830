"""The samples that `prepare` makes of published files: clicks in the order of the lines, or histories of users."""
