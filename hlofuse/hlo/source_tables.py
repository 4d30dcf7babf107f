"""Source lines in HLO text: `metadata={...}`, and the FileNames and StackFrames tables of compiled modules.

Compiled text names a stack frame by number; the tables in front of the computations say which file and line that is.
"""
from __future__ import annotations

import re

from hlofuse.hlo.attributes import unquote
from hlofuse.hlo.lexer import Scanner
from hlofuse.hlo.module import NO_METADATA, Metadata

_TITLE = re.compile(r"\s*(FileNames|FunctionNames|FileLocations|StackFrames)[ \t]*(?=\n)")
_ROW = re.compile(r"\s*(\d+)[ \t]+(\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})")
_FIELD = re.compile(r"(\w+)=(\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\}|[^\s{}]+)", re.DOTALL)


class SourceTables:
    """Answers where a stack frame is; empty where the text has no tables."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, str]] = {}
        self._metadata: dict[str, Metadata] = {}

    def read(self, scan: Scanner) -> None:
        """Reads the tables that stand here, if any."""
        while title := scan.match(_TITLE):
            rows = self._rows.setdefault(title[1], {})
            while row := scan.match(_ROW):
                rows[int(row[1])] = row[2]

    def place(self, frame: int) -> tuple[str, int]:
        """File and line of a stack frame; ("", 0) for one that the tables lack."""
        location = _fields(self._rows.get("StackFrames", {}).get(frame, "")).get("file_location_id", "")
        fields = _fields(self._rows.get("FileLocations", {}).get(_number(location), ""))
        name = self._rows.get("FileNames", {}).get(_number(fields.get("file_name_id", "")))
        return (unquote(name), _number(fields.get("line", ""))) if name else ("", 0)

    def metadata(self, text: str) -> Metadata:
        found = self._metadata.get(text)
        if found is None:
            found = self._metadata[text] = self._read(text)
        return found

    def _read(self, text: str) -> Metadata:
        fields = _fields(text)
        file, line = _string(fields.get("source_file", "")), _number(fields.get("source_line", ""))
        if not file and "stack_frame_id" in fields:
            file, line = self.place(_number(fields["stack_frame_id"]))
        metadata = Metadata(_string(fields.get("op_type", "")), _string(fields.get("op_name", "")), file, line)
        return NO_METADATA if metadata == NO_METADATA else metadata


def read_metadata(text: str, tables: SourceTables) -> Metadata:
    """What `{op_name="..." source_file="..." source_line=3}` says; fields that are not kept are skipped."""
    return tables.metadata(text)


def _fields(text: str) -> dict[str, str]:
    return {match[1]: match[2] for match in _FIELD.finditer(text)}


def _string(text: str) -> str:
    return unquote(text) if text.startswith('"') else text


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
