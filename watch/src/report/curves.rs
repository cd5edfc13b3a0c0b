//! Curves of a run's numbers.

use super::{Chart, ChartLine};
use crate::sink::Record;

/// Makes charts of all numbers over the step. Names with an equal last part are lines of one chart: `train/loss` and
/// `validation/loss`. Charts and lines come in the order in which their names were first recorded. A step that was
/// measured again, after a run went back, replaces the points from that step on.
pub fn charts_of(records: &[Record]) -> Vec<Chart> {
    let mut charts: Vec<Chart> = Vec::new();
    for record in records {
        for (name, value) in record.scalars() {
            let title = name.rsplit('/').next().unwrap_or(name);
            let point = (record.step as f64, value);
            let chart = of_title(&mut charts, title);
            match chart.lines.iter_mut().find(|line| line.name == name) {
                Some(line) => {
                    while line.points.pop_if(|last| last.0 >= point.0).is_some() {}
                    line.points.push(point);
                }
                None => chart.lines.push(ChartLine { name: name.into(), points: vec![point] }),
            }
        }
    }
    charts
}

fn of_title<'a>(charts: &'a mut Vec<Chart>, title: &str) -> &'a mut Chart {
    let at = charts.iter().position(|chart| chart.title == title).unwrap_or_else(|| {
        charts.push(Chart { title: title.into(), x_label: "step".into(), lines: Vec::new() });
        charts.len() - 1
    });
    &mut charts[at]
}
