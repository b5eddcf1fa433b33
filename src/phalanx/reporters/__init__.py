"""Reports for people, as lines of text.

Files:
    text.py      the report of a job
    blame.py     the cause of a failure
    wording.py   phrases that they share
"""
