//! Sinks that write files for people: [`SvgCurves`] and [`HtmlReport`].

use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use numcore::Result;

use super::{Report, chart, charts_of, page::replace};
use crate::sink::{Record, Sink};

/// Writes `curves.svg`, a chart for each number, whenever it is flushed: at checkpoints and at the end.
#[derive(Debug)]
pub struct SvgCurves {
    path: PathBuf,
    records: Vec<Record>,
}

impl SvgCurves {
    /// Writes into a folder, which is made if it does not exist.
    pub fn in_folder(folder: impl AsRef<Path>) -> Self {
        SvgCurves { path: folder.as_ref().join("curves.svg"), records: Vec::new() }
    }

    /// Begins with earlier records: the lines of a run that this one goes on from, as
    /// [`read_jsonl`](crate::sink::read_jsonl) reads them. A step that is measured again replaces the points from that
    /// step on.
    pub fn records(mut self, before: &[Record]) -> Self {
        before.iter().for_each(|record| self.push(record));
        self
    }

    /// Keeps the numbers of a record alone, as pictures would fill the memory.
    fn push(&mut self, record: &Record) {
        let values = record.values.iter().filter(|(_, value)| matches!(value, crate::sink::Value::Scalar(_)));
        self.records.push(Record { values: values.cloned().collect(), ..*record });
    }

    /// Draws charts in two columns.
    fn to_svg(&self) -> String {
        let charts = charts_of(&self.records);
        let rows = charts.len().div_ceil(2).max(1);
        let (width, height) = (2.0 * chart::WIDTH, rows as f64 * chart::HEIGHT);
        let placed = |(k, chart): (usize, &super::Chart)| {
            let (x, y) = ((k % 2) as f64 * chart::WIDTH, (k / 2) as f64 * chart::HEIGHT);
            format!("<g transform=\"translate({x} {y})\">{}</g>\n", chart.to_svg())
        };
        let body: String = charts.iter().enumerate().map(placed).collect();
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" color=\"#222\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{body}</svg>\n"
        )
    }
}

impl Sink for SvgCurves {
    fn write(&mut self, record: &Record) -> Result<()> {
        self.push(record);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        replace(&self.path, &self.to_svg())
    }
}

/// Writes a [`Report`] of all records whenever it is flushed: at checkpoints and at the end. A [live](HtmlReport::live)
/// one shows a run while it goes on.
#[derive(Debug)]
pub struct HtmlReport {
    path: PathBuf,
    report: Report,
    live: Option<Duration>,
    /// The time of the record that was written last.
    written: Option<SystemTime>,
}

impl HtmlReport {
    /// Writes `report`, with all records from now on, to a file.
    pub fn at(path: impl AsRef<Path>, report: Report) -> Self {
        HtmlReport { path: path.as_ref().into(), report, live: None, written: None }
    }

    /// Writes the page with the first record, then at most once in this time; a browser loads it again as often. The
    /// page that is written when the sink is dropped stays as it is.
    #[doc(alias("auto refresh", "dashboard"))]
    pub fn live(mut self, every: Duration) -> Self {
        self.report.set_refresh(Some(every));
        self.live = Some(every);
        self
    }
}

impl Sink for HtmlReport {
    fn write(&mut self, record: &Record) -> Result<()> {
        self.report.push(record);
        let is_due = |every: Duration| {
            self.written.is_none_or(|at| record.time.duration_since(at).is_ok_and(|since| since >= every))
        };
        if !self.live.is_some_and(is_due) {
            return Ok(());
        }
        self.written = Some(record.time);
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        self.report.write(&self.path)
    }
}

impl Drop for HtmlReport {
    fn drop(&mut self) {
        if self.written.is_some() {
            self.report.set_refresh(None);
            // There is nowhere left to report a failure.
            let _ = self.flush();
        }
    }
}
