"""The pages of ``rayrl studio``: server-rendered HTML over the services the JSON API uses.

Invariants: every page has a URL of its own and every action is a plain form, so all of it works without script; text
that comes from a model, a file or a user is escaped by the templates, never marked safe; nothing is loaded from beyond
this server; every visible string comes from the message catalogue in both languages.

How a section joins. Write ``rayrl/studio/pages/NAME.py`` (or a package of that name) for one of the names in
:data:`rayrl.studio.pages.shell.NAMES` and define in it ``SECTION = Section("NAME", "/NAME", router)``. The shell finds
it, includes its router and shows it in the navigation; nothing else needs to be edited. A router is an ordinary
``APIRouter(include_in_schema=False)``; its handlers are plain functions::

    @router.get("/runs/{run_id}")
    def show(request: Request, ctx: Ctx, run_id: str) -> Response:
        return page(request, "runs/show.html", run=load(run_id))

* **Context**: ``Ctx`` from :mod:`rayrl.studio.context` is the application's services and settings.
* **Templates** lie in ``templates/NAME/``; they begin with ``{% extends "base.html" %}`` and
  ``{% import "ui.html" as ui with context %}``. Blocks of ``base.html``: ``title`` (of the window), ``crumbs``,
  ``heading`` (the h1 and what stands beside it), ``content``, ``keys`` (rows of the keyboard help, with ``ui.key``).
* **Messages** lie in ``messages/{en,zh}/NAME.yaml``; ``t('NAME.some_key', n=3)`` in a template, ``texts(request)`` in
  Python. A message with `` | `` has a singular and a plural, chosen by ``n``. Keys built from values
  (``t('NAME.state.' ~ state)``) fall back to the value.
* **Numbers** are formatted by the filters of :mod:`rayrl.studio.pages.format` (``pct``, ``num``, ``points``,
  ``pvalue``, ``secs``, ``size``, ``when``). A rate is a dict ``{value, low, high, n}``; ``ui.figure`` and
  ``ui.rate_cells`` show it with its interval.
* **Macros** of ``ui.html``: ``chip``, ``state``, ``figure``, ``whisker``, ``rate_cells``, ``tabs``, ``table``/
  ``pager`` (keyset: the server says the URL of the following page), ``empty``, ``problem``, ``chart`` (a plotly figure
  as a dict from :mod:`rayrl.studio.pages.charts`, drawn by ``static/studio.js`` in the colours of the theme, with the
  numbers as a table below), ``confusion``, ``diff`` (segments of :func:`rayrl.studio.pages.texts.word_diff`),
  ``unified`` (a unified diff), ``progress``, ``kv``, ``post`` (a button that is a form).
* **URLs**: ``here(cursor='x', sort=None)`` is the present URL with some of its query exchanged (``None`` removes one).
* **Errors**: raise a ``UserError`` (``MissingError`` for a 404); browsers get a page, the API gets JSON.
* **Keyboard**: an element with ``data-key="x"`` is clicked (a field: focused) by that key; in a table with
  ``data-rows`` the keys j and k move over the rows and Enter opens the first link; on other pages j and k follow
  ``a[rel=next]`` and ``a[rel=prev]``.
* **Live parts**: inside an element with ``data-events="URL"`` of server-sent events, the parts with an id and
  ``data-live`` are fetched anew when something happens.
"""
