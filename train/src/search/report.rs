//! [`SearchReport`]: the results of a search as a table, as lines of JSON, and as a page.

use std::{fmt, path::PathBuf};

use numcore::{Result, safetensors::replace_file};
use watch::report::{Chart, ChartLine, Report};

use super::trial::{Outcome, Trial};

/// The trials whose curves share one chart: as many as it has colours.
const TOGETHER: usize = 6;

/// The results of a search, the best first.
///
/// Trials of the greatest budget come first, by their values; equal values by the number of the trial. Then come those
/// that were stopped earlier, then those whose value is NaN, then those that failed. Its text is a table.
#[derive(Debug)]
pub struct SearchReport {
    /// The results, the best first.
    pub results: Vec<SearchResult>,
    pub(super) folder: PathBuf,
    pub(super) metric: String,
    /// The options of the search, by name.
    pub(super) about: Vec<(&'static str, String)>,
}

/// The result of one trial.
#[derive(Debug)]
pub struct SearchResult {
    /// The trial, with the budget that it reached.
    pub trial: Trial,
    /// The value of the metric, or the text of the trial's error.
    pub outcome: Outcome,
    /// Budgets and values of the earlier rungs.
    pub points: Vec<(u64, f64)>,
}

impl SearchReport {
    /// The best trial; none if no trial has a value that is a number.
    #[doc(alias("best_trial", "best_params", "best_value", "get_best_result"))]
    pub fn best(&self) -> Option<&SearchResult> {
        self.results.first().filter(|first| first.outcome.as_ref().is_ok_and(|value| !value.is_nan()))
    }

    /// The results as lines of JSON, the best first: trial, budget, value or error, and the fields.
    pub fn to_jsonl(&self) -> String {
        self.results.iter().map(|result| format!("{}\n", result.trial.to_json(&result.outcome))).collect()
    }

    /// The results as one page of HTML. A trial's curve is in its `metrics.jsonl`, or else of the values of its rungs.
    pub fn to_html(&self) -> String {
        let mut page = Report::new("search").configuration(self.about.clone());
        if let Some(best) = self.best() {
            let value = best.outcome.as_ref().map_or(f64::NAN, |&value| value);
            page = page.configuration([("best trial", format!("{}, of value {value:?}", best.trial.number))]);
            page = page.configuration(best.trial.fields.clone());
        }
        let lines: Vec<ChartLine> = self.results.iter().map(|result| self.curve(result)).collect();
        let chart = |title: &str, lines: &[ChartLine]| Chart {
            title: title.into(),
            x_label: "step".into(),
            lines: lines.into(),
        };
        page = page.text("Trials", self.to_string()).chart(chart(&self.metric, &lines[..lines.len().min(TOGETHER)]));
        lines.iter().fold(page, |page, line| page.chart(chart(&line.name, std::slice::from_ref(line)))).to_html()
    }

    fn curve(&self, SearchResult { trial, outcome, points }: &SearchResult) -> ChartLine {
        let rungs = || points.iter().copied().chain(outcome.iter().map(|&value| (trial.budget, value)));
        let recorded = trial.curve(&self.metric).ok().filter(|points| !points.is_empty());
        let points = recorded.unwrap_or_else(|| rungs().map(|(budget, value)| (budget as f64, value)).collect());
        ChartLine { name: format!("trial {}", trial.number), points }
    }

    /// Writes all three into the folder of the search.
    pub(super) fn write(&self) -> Result<()> {
        for (name, text) in
            [("results.jsonl", self.to_jsonl()), ("results.txt", self.to_string()), ("report.html", self.to_html())]
        {
            replace_file(self.folder.join(name), text.as_bytes())?;
        }
        Ok(())
    }
}

impl fmt::Display for SearchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = |result: &SearchResult| result.trial.fields.clone();
        let names = self.results.first().map(fields).unwrap_or_default().into_iter().map(|(name, _)| name);
        let mut rows = vec![["trial".into(), "budget".into(), self.metric.clone()].into_iter().chain(names).collect()];
        for result in &self.results {
            let value = result.outcome.as_ref().map_or("failed".into(), |value| format!("{value:?}"));
            let mut row = vec![result.trial.number.to_string(), result.trial.budget.to_string(), value];
            row.extend(fields(result).into_iter().map(|(_, value)| value));
            row.extend(result.outcome.as_ref().err().map(|error| error.lines().next().unwrap_or_default().into()));
            rows.push(row);
        }
        let columns = rows[0].len();
        let width = |i: usize| rows.iter().filter_map(|row: &Vec<String>| row.get(i)).map(|c| c.chars().count()).max();
        let widths: Vec<usize> = (0..columns).filter_map(width).collect();
        for row in &rows {
            let cells =
                row.iter().enumerate().map(|(i, cell)| format!("{cell:<0$}", widths.get(i).copied().unwrap_or(0)));
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}
