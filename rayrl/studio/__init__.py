"""The web application ``rayrl studio``: one JSON API over the workbench (and the pages over it)."""
