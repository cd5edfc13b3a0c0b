//! [`Report`]: one page of HTML about a run.

use std::{fmt::Write as _, fs, path::Path, time::Duration};

use numcore::{Error, Result, Within, trace::SpanKind};

use super::{Chart, axis::label, charts_of, memory, samples};
use crate::{escape::escaped, recorder::RunTimeline, sink::Record};

/// A page about a run: configuration, curves, numbers, samples, timeline, memory. It is one file that needs no other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    title: String,
    configuration: Vec<(String, String)>,
    records: Vec<Record>,
    charts: Vec<Chart>,
    texts: Vec<(String, String)>,
    timeline: Option<RunTimeline>,
    refresh: Option<Duration>,
}

/// The content policy: a browser that honours it loads nothing from anywhere, and runs nothing.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";

const STYLE: &str = "
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #8884; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: 1rem; }
.charts svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
pre { white-space: pre-wrap; background: #8881; padding: .6rem; border-radius: .3rem; } pre.table { white-space: pre; overflow-x: auto; }
.step, figcaption { color: #888; margin: .5rem 0 0; } figure { display: inline-block; margin: 0 1rem 0 0; } img { image-rendering: pixelated; min-width: 8rem; height: auto; }
";

impl Report {
    /// Makes an empty page of this title.
    pub fn new(title: impl Into<String>) -> Self {
        Report { title: title.into(), ..Report::default() }
    }

    /// Adds options of the run, in this order.
    pub fn configuration<K: Into<String>, V: Into<String>>(
        mut self,
        options: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        self.configuration.extend(options.into_iter().map(|(key, value)| (key.into(), value.into())));
        self
    }

    /// Adds records, after the earlier ones.
    pub fn records(mut self, records: &[Record]) -> Self {
        self.records.extend_from_slice(records);
        self
    }

    /// Adds one record.
    pub(super) fn push(&mut self, record: &Record) {
        self.records.push(record.clone());
    }

    /// Adds a chart of one's own, after the curves of the records.
    pub fn chart(mut self, chart: Chart) -> Self {
        self.charts.push(chart);
        self
    }

    /// Adds a part with a text whose columns are kept: a model's summary.
    pub fn text(mut self, title: impl Into<String>, text: impl Into<String>) -> Self {
        self.texts.push((title.into(), text.into()));
        self
    }

    /// Sets the timeline to show, with the memory that was recorded in it.
    pub fn timeline(mut self, timeline: RunTimeline) -> Self {
        self.timeline = Some(timeline);
        self
    }

    /// Sets the time after which a browser loads the page again, in whole seconds; none for never.
    pub(super) fn set_refresh(&mut self, every: Option<Duration>) {
        self.refresh = every;
    }

    /// The page's HTML.
    pub fn to_html(&self) -> String {
        let title = escaped(&self.title);
        let refresh = self.refresh.map(|every| every.as_secs().max(1));
        let refresh = refresh.map(|s| format!("<meta http-equiv=\"refresh\" content=\"{s}\">\n")).unwrap_or_default();
        let parts =
            [self.head(), self.options(), self.curves(), self.numbers(), self.samples(), self.notes(), self.times()];
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n{refresh}\
             <title>{title}</title><style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n{}</body></html>\n",
            parts.concat()
        )
    }

    /// Writes the page to a file, which is replaced once the new one is complete.
    ///
    /// # Errors
    /// An error if the file cannot be written.
    #[track_caller]
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        replace(path.as_ref(), &self.to_html()).at_caller()
    }

    fn head(&self) -> String {
        let (Some(first), Some(last)) = (self.records.first(), self.records.last()) else { return String::new() };
        let seconds = last.seconds() - first.seconds();
        let time = if seconds < 120.0 { format!("{seconds:.1} s") } else { format!("{:.1} minutes", seconds / 60.0) };
        format!("<p>Steps {} to {}, epoch {}, {time}.</p>\n", first.step, last.step, last.epoch)
    }

    fn options(&self) -> String {
        let row = |(key, value): &(String, String)| {
            format!("<tr><td>{}</td><td>{}</td></tr>\n", escaped(key), escaped(value))
        };
        part("Configuration", "<table>", &self.configuration.iter().map(row).collect::<String>(), "</table>")
    }

    fn curves(&self) -> String {
        let all = charts_of(&self.records);
        let charts = all.iter().chain(&self.charts).map(|chart| format!("<div>{}</div>", chart.to_svg()));
        let charts: String = charts.collect();
        part("Curves", "<div class=\"charts\">", &charts, "</div>")
    }

    /// The last value of every number, and the least and the greatest with their steps.
    fn numbers(&self) -> String {
        let mut rows = String::new();
        for line in charts_of(&self.records).into_iter().flat_map(|chart| chart.lines) {
            let numbers = || line.points.iter().filter(|(_, x)| !x.is_nan());
            // The first of equal ones.
            let least = numbers().min_by(|(_, x), (_, y)| x.total_cmp(y));
            let greatest = numbers().rev().max_by(|(_, x), (_, y)| x.total_cmp(y));
            let last = line.points.last().map_or(f64::NAN, |(_, x)| *x);
            let at = |point: Option<&(f64, f64)>| {
                point.map_or([String::new(), String::new()], |(step, x)| [label(*x), step.to_string()])
            };
            let cells = [vec![label(last)], at(least).into(), at(greatest).into()].concat();
            let cells: String = cells.iter().map(|cell| format!("<td class=\"number\">{cell}</td>")).collect();
            let _ = writeln!(rows, "<tr><td>{}</td>{cells}</tr>", escaped(&line.name));
        }
        part(
            "Numbers",
            "<table><tr><th></th><th>last</th><th>least</th><th>at step</th><th>greatest</th><th>at step</th></tr>",
            &rows,
            "</table>",
        )
    }

    fn samples(&self) -> String {
        part("Samples", "", &samples::to_html(&self.records), "")
    }

    fn notes(&self) -> String {
        let text =
            |(title, text): &(String, String)| part(&escaped(title), "<pre class=\"table\">", &escaped(text), "</pre>");
        self.texts.iter().map(text).collect()
    }

    fn times(&self) -> String {
        let Some(timeline) = &self.timeline else { return String::new() };
        let memory: String = timeline
            .ranks
            .iter()
            .filter_map(|rank| memory::to_svg(rank, timeline.length))
            .map(|svg| format!("<div>{svg}</div>"))
            .collect();
        let costs = [SpanKind::Op, SpanKind::Kernel].map(|kind| escaped(&timeline.costliest(kind, 20))).join("\n");
        part("Timeline", "<div class=\"wide\">", &timeline.to_svg(), "</div>")
            + &part("Costliest operations", "<pre class=\"table\">", costs.trim(), "</pre>")
            + &part("Memory", "<div class=\"charts\">", &memory, "</div>")
    }
}

/// A part of the page, unless its body is empty. The title is escaped already.
fn part(title: &str, open: &str, body: &str, close: &str) -> String {
    if body.is_empty() { String::new() } else { format!("<h2>{title}</h2>\n{open}{body}{close}\n") }
}

/// Replaces a file at once, and makes its folder.
pub(super) fn replace(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    }
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    fs::write(&part, text).map_err(|e| Error::io(&part, e))?;
    fs::rename(&part, path).map_err(|e| Error::io(path, e))
}
