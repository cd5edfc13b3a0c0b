//! The values of ranks as bars: lag, waits, memory.

use ratatui::{
    buffer::Buffer,
    layout::{Constraint, Layout, Rect},
    style::{Color, Stylize},
    text::Line,
    widgets::{Paragraph, Widget},
};

use super::{state::ShownRun, text::number};
use crate::report::{Chart, ChartLine};

/// The last value of each rank, by the name that comes after `rank/3/`.
pub(super) struct RankBars<'a> {
    pub title: &'a str,
    /// Rank and value, by rank.
    pub values: Vec<(usize, f64)>,
}

/// The least width of bars with their text.
const WIDTH: u16 = 24;

/// The values of a run's ranks, in the order of its charts, from lines such as `rank/3/lag_seconds`.
pub(super) fn of_run(run: &ShownRun) -> Vec<RankBars<'_>> {
    let of_chart = |chart: &Chart| {
        let last = |line: &ChartLine| Some((rank_of(&line.name)?, *line.points.last()?));
        let lasts: Vec<(usize, (f64, f64))> = chart.lines.iter().filter_map(last).collect();
        // Ranks that are gone have no value of the last record.
        let newest = lasts.iter().map(|(_, point)| point.0).fold(f64::NEG_INFINITY, f64::max);
        let present = lasts.into_iter().filter(|(_, point)| point.0 == newest);
        let mut values: Vec<(usize, f64)> = present.map(|(rank, point)| (rank, point.1)).collect();
        values.sort_by_key(|(rank, _)| *rank);
        values
    };
    let all = run.file.charts().iter().map(|chart| RankBars { title: &chart.title, values: of_chart(chart) });
    all.filter(|ranks| !ranks.values.is_empty()).collect()
}

fn rank_of(name: &str) -> Option<usize> {
    name.strip_prefix("rank/")?.split_once('/')?.0.parse().ok()
}

/// Draws as many sets of bars beside each other as fit.
pub(super) fn draw(sets: &[RankBars<'_>], area: Rect, out: &mut Buffer) {
    let fitting = sets.len().min(usize::from(area.width / WIDTH).max(1));
    let areas = Layout::horizontal(vec![Constraint::Fill(1); fitting]).spacing(2).split(area);
    sets.iter().zip(areas.iter()).for_each(|(set, &area)| set.draw(area, out));
}

impl RankBars<'_> {
    /// Draws a bar for each rank; for those with the greatest values, if not all fit.
    fn draw(&self, area: Rect, out: &mut Buffer) {
        let rows = usize::from(area.height.saturating_sub(1));
        let mut values = self.values.clone();
        let mut title = format!("{} of ranks", self.title);
        if values.len() > rows {
            title = format!("{title}, the highest of {}", values.len());
            values.sort_by(|a, b| b.1.total_cmp(&a.1));
            values.truncate(rows);
        }
        let most = values.iter().map(|(_, x)| *x).filter(|x| x.is_finite()).fold(0.0, f64::max);
        let texts: Vec<String> = values.iter().map(|(_, x)| number(self.title, *x)).collect();
        let rank_width = values.iter().map(|(rank, _)| rank.to_string().len()).max().unwrap_or(1);
        let text_width = texts.iter().map(|text| text.chars().count()).max().unwrap_or(0);
        let room = usize::from(area.width).saturating_sub(rank_width + text_width + 2);
        let bar = |x: f64| if most > 0.0 && x > 0.0 { (x.min(most) / most * room as f64).round() as usize } else { 0 };
        let rows = values.iter().zip(&texts).map(|((rank, x), text)| {
            let bar = "█".repeat(bar(*x));
            Line::from(vec![
                format!("{rank:rank_width$} ").dim(),
                format!("{bar:room$}").fg(Color::Cyan),
                format!(" {text:>text_width$}").into(),
            ])
        });
        let lines: Vec<Line> = std::iter::once(Line::from(title).bold()).chain(rows).collect();
        Paragraph::new(lines).render(area, out);
    }
}
