//! Curves of a run's numbers.

use std::collections::HashMap;

use super::{Chart, ChartLine};
use crate::sink::Record;

/// Makes charts of all numbers over the step. Names with an equal last part are lines of one chart: `train/loss` and
/// `validation/loss`. Charts and lines come in the order in which their names were first recorded. A step that was
/// measured again, after a run went back, replaces the points from that step on.
pub fn charts_of(records: &[Record]) -> Vec<Chart> {
    let mut charts = GrowingCharts::default();
    records.iter().for_each(|record| charts.add(record));
    charts.charts
}

/// Charts to which records are added.
#[derive(Debug, Default)]
pub(crate) struct GrowingCharts {
    charts: Vec<Chart>,
    /// The chart and the line of a name.
    places: HashMap<String, (usize, usize)>,
}

impl GrowingCharts {
    /// Adds the numbers of a record, in place of the points of their names from its step on.
    pub(crate) fn add(&mut self, record: &Record) {
        for (name, value) in record.scalars() {
            let (chart, line) = match self.places.get(name) {
                Some(&place) => place,
                None => self.place(name),
            };
            let (points, point) = (&mut self.charts[chart].lines[line].points, (record.step as f64, value));
            while points.pop_if(|last| last.0 >= point.0).is_some() {}
            points.push(point);
        }
    }

    /// Adds a line without points.
    fn place(&mut self, name: &str) -> (usize, usize) {
        let title = name.rsplit('/').next().unwrap_or(name);
        let chart = self.charts.iter().position(|chart| chart.title == title).unwrap_or_else(|| {
            self.charts.push(Chart { title: title.into(), x_label: "step".into(), lines: Vec::new() });
            self.charts.len() - 1
        });
        let lines = &mut self.charts[chart].lines;
        lines.push(ChartLine { name: name.into(), points: Vec::new() });
        self.places.insert(name.into(), (chart, lines.len() - 1));
        (chart, lines.len() - 1)
    }
}

#[cfg(feature = "terminal")]
impl GrowingCharts {
    pub(crate) fn charts(&self) -> &[Chart] {
        &self.charts
    }

    /// Removes all points after a step, to which the run went back.
    pub(crate) fn go_back(&mut self, step: u64) {
        for line in self.charts.iter_mut().flat_map(|chart| &mut chart.lines) {
            while line.points.pop_if(|last| last.0 > step as f64).is_some() {}
        }
    }
}
