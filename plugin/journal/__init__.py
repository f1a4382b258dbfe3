"""The append-only decision log of a run: events, writer, reader, text report."""

from rematic.journal.events import FILE_NAME as FILE_NAME
from rematic.journal.events import SCHEMA_VERSION as SCHEMA_VERSION
from rematic.journal.events import EventSink as EventSink
from rematic.journal.events import JournalError as JournalError
from rematic.journal.parts import missing_parts as missing_parts
from rematic.journal.reader import find_journal as find_journal
from rematic.journal.reader import read_journal as read_journal
from rematic.journal.report import format_report as format_report
from rematic.journal.report import format_summary as format_summary
from rematic.journal.steady import SteadyJournal as SteadyJournal
from rematic.journal.summary import PlanSummary as PlanSummary
from rematic.journal.summary import RunSummary as RunSummary
from rematic.journal.summary import describe_plan as describe_plan
from rematic.journal.summary import prediction_error as prediction_error
from rematic.journal.summary import summarize as summarize
from rematic.journal.table import text_table as text_table
from rematic.journal.tail import JournalTail as JournalTail
from rematic.journal.writer import JournalWriter as JournalWriter
