"""The beginning of `fedloom reproduce --help`."""

REPRODUCE_HELP = """Runs what a paper's table or figure needs, and says which of its claims the results show.

  fedloom reproduce --list                            the items, what they need, and how they stand here
  fedloom reproduce fedoras/tab8                      what is counted without training: seconds
  fedloom reproduce fedoras/tab6                      at the small scale: a laptop, less than an hour
  fedloom reproduce fedoras/tab6 scale=paper          what the paper ran; it goes on after Ctrl-C, kill or crash
  fedloom reproduce fedoras/tab6 seeds=[1,2,3,4,5] method.train.rounds=100     changed: not on the scoreboard
  fedloom reproduce --scoreboard --out board          all claims of all papers, also as a page with figures
  fedloom reproduce --scoreboard --recorded           with values kept from earlier runs where nothing is run here
  fedloom reproduce fedoras/tab6 --record             runs it, and keeps the values beside the item

A claim is shown or contradicted if the 95 % interval over seeds says so everywhere it is made, or anywhere; else it is
not shown. Exit code 0: it ran, whatever it found; 2: unknown, or no data, with a line that says which file goes where.
"""
