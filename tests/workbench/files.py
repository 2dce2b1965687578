"""Small files made by hand: workbooks part by part, so that every oddity is really there."""

import io
import zipfile

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
REL = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PKG = "http://schemas.openxmlformats.org/package/2006/relationships"


def cell(ref, text):
    return f'<c r="{ref}" t="inlineStr"><is><t>{text}</t></is></c>'


def sheet(rows, *, dimension="", tail=""):
    body = "".join(f'<row r="{number}">{"".join(cells)}</row>' for number, cells in rows)
    shape = f'<dimension ref="{dimension}"/>' if dimension else ""
    return f'<worksheet xmlns="{MAIN}">{shape}<sheetData>{body}</sheetData>{tail}</worksheet>'


def workbook(*sheets, states=None, kinds=None, styles=None, extra=None):
    """XLSX bytes; ``sheets`` are (name, xml)."""
    out = io.BytesIO()
    states, kinds = states or {}, kinds or {}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as package:
        listed, relations = "", ""
        for index, (name, xml) in enumerate(sheets, 1):
            kind = kinds.get(name, "worksheet")
            state = f' state="{states[name]}"' if name in states else ""
            listed += f'<sheet name="{name}" sheetId="{index}"{state} r:id="rId{index}"/>'
            relations += f'<Relationship Id="rId{index}" Type="{REL}/{kind}" Target="{kind}s/s{index}.xml"/>'
            package.writestr(f"xl/{kind}s/s{index}.xml", xml)
        package.writestr(
            "xl/workbook.xml", f'<workbook xmlns="{MAIN}" xmlns:r="{REL}"><sheets>{listed}</sheets></workbook>'
        )
        package.writestr("xl/_rels/workbook.xml.rels", f'<Relationships xmlns="{PKG}">{relations}</Relationships>')
        if styles:
            package.writestr("xl/styles.xml", f'<styleSheet xmlns="{MAIN}">{styles}</styleSheet>')
        for path, data in (extra or {}).items():
            package.writestr(path, data)
    return out.getvalue()


HEAD = (1, [cell("A1", "id"), cell("B1", "query")])
