"""One file for each format of a checkpoint: it recognizes, describes and loads it, without running anything of it.

A format of one file has what ``describing.FileFormat`` says, one of several files what ``sources.FolderFormat`` says.
"""
