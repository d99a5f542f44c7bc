"""What the pages of the commands share: their frame, their pieces, their colours, and pictures that stand in them.

A page is one file that asks nothing of the network. Nothing is imported here.
"""
