"""How Sphinx renders the site; `tools/build_site.py` prepares the pages and runs it."""

from __future__ import annotations

from polyshard import __version__

project = "polyshard"
author = "the polyshard authors"
copyright = "the polyshard authors, BSD-3-Clause"
release = __version__
version = ".".join(__version__.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
nitpicky = False  # names of torch are not described here, and other sites are not asked

myst_heading_anchors = 4
myst_links_external_new_tab = False

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False

html_theme = "furo"
html_title = "polyshard"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_js_files = [("switch.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/version.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f6f8b", "color-brand-content": "#1f6f8b"},
    "dark_css_variables": {"color-brand-primary": "#6cc4de", "color-brand-content": "#6cc4de"},
}
