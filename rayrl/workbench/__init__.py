"""The Skill evaluation workbench: labelled data, frozen Skills, headless runs, evidence, reviews and comparisons."""
