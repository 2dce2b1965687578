#!/bin/sh
# Counts the rules of the knowledge files.
grep -hE '^- (快|慢)：' "$(dirname "$0")"/../knowledge/*.md | wc -l
