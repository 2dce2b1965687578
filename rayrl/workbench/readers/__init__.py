"""Uploaded files to rows of text. What reads foreign bytes runs in a limited child process (:mod:`.child`)."""
