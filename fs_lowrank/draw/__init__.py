"""Pictures and pages: panels of lines, bars and matrices as data, drawn by matplotlib, and HTML pages by jinja2.

The room knows records and configurations, and no folder of a run: ``runs`` reads the files.
"""
