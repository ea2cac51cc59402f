"""The queues and the step loop around the compiled programs.

config, request, pages, plan and scheduler (with its parts admission, chunking, placement, results
and stopping) are host-only; runner and engine call programs.
"""
