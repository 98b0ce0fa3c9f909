"""Measuring, from the question to the page.

suites, yardsticks -> subject, rivals    what is measured, and who competes
timing, clock, roofs, roof_kernels       how long it takes, and how long it must take
witness, guard, measure                  what really ran, what cannot be, one case measured
run, record, machine                     a whole run, and what it leaves behind
contest, tables, predict                 on a terminal
compare                                  two runs
report, plots, canvas, svg               on a page
host, agreement                          what a call costs the CPU; our clock beside Triton's
"""
