"""These are the engines that `forerun deploy` knows: one file each, and one line in
`deploy.launch.ENGINES`.
"""
