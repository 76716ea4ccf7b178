"""The steps of the export. None of them imports another; edgeyolo.tools.export names them in order."""
