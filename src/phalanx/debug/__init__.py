"""What outlives a job: black boxes, the folders they lie in, and what they tell.

While a job runs:
    observing.py     the observer: records, warns, reports
    advising.py      the adviser: where ranks are, what they did last
    seen.py          the groups that both know
    answers.py       the thread that tells peers where this process is
    absence.py       where absent ranks are
    wait_watch.py    the thread that looks for deadlocks
    waiting.py       what processes show of their waits
    thread_looks.py  which threads of this process may still act
    deadlocks.py     whether ranks wait for each other for ever
    finite.py        looks for non-finite values
    makings.py       groups that are being made
    own_box.py       the black box of this process
    posted.py        calls that ranks have posted, from boxes

Files:
    folders.py       the folder of a job
    bases.py         where job folders are
    job_folder.py    the only way to the files of a job
    box_reader.py    reads boxes, each record once
    box_parsing.py   turns bytes into records
    box_layout.py    where the fields are
    box_texts.py     the texts that records refer to
    records.py       what a box says

What boxes tell:
    evidence.py      reads everything of a job
    job.py           the groups of a job, as its boxes show them
    moments.py       a job at some moment of its past
    fates.py         how processes ended
    causes.py        why a job stopped
    flight.py        boxes as traces for torch's analyzer
    dumping.py       writes such a trace
"""
