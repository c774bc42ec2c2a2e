"""One file for each format of a checkpoint: how it is recognized and described, without running anything of it.

A format of one file has what ``describing.FileFormat`` says, one of several files what ``sources.FolderFormat`` says.
``torch_files`` loads what was described, by torch where the format is torch's.
"""
