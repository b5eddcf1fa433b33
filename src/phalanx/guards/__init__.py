"""Guards: Phalanx' checks and reports around groups whose bytes another backend moves.

Files:
    guarding.py     makes guards: for one group, or for every group that the program makes
    guarded.py      the group that torch sees in place of the plain one
    calls.py        how a guarded call is posted, handed to the engine and waited for
    describing.py   descriptions of calls
    work.py         the handles that guarded calls return
    watch.py        the thread that looks after calls under way
    engines.py      what each backend needs: above all, how its pending calls are ended
    gloo_links.py   the connections of a Gloo group
    settings.py     PHALANX_GUARD
"""
