"""PDF files for tests: pages of lines of Latin text, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import pypdf


def pdf(*pages: Sequence[str]) -> bytes:
    """A PDF file whose pages have these lines."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    kids = []
    for lines in pages:
        shown = "".join(f"({_escaped(line)}) Tj 0 -14 Td\n" for line in lines)
        stream = f"BT /F1 12 Tf 50 780 Td\n{shown}ET"
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {len(objects)} 0 R "
            f"/Resources << /Font << /F1 {font} >> >> >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out = b"%PDF-1.4\n"
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("cp1252")
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return out + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}".encode()


def _escaped(line: str) -> str:
    return line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")


def encrypted(data: bytes, password: str) -> bytes:
    """The file as one that needs a password."""
    writer = pypdf.PdfWriter(clone_from=BytesIO(data))
    writer.encrypt(password, algorithm="RC4-128")
    out = BytesIO()
    writer.write(out)
    return out.getvalue()
