//! The screen as a function of the runs, the time and a size.

use std::time::SystemTime;

use ratatui::{
    buffer::Buffer,
    layout::{Constraint, Layout, Rect},
    style::Stylize,
    text::Line,
    widgets::{Paragraph, Widget},
};

use super::{
    curves, ranks,
    state::{RunScreen, SMOOTHING, ShownRun},
    text::{in_words, number},
};

const KEYS: &str = "↑↓ curve  s smooth  +- zoom  Tab run of ranks  q quit";

/// The least width at which the names of curves stand beside the chart.
const WIDE: u16 = 60;

impl RunScreen {
    /// Draws the screen as of `now`. Whatever does not fit is left out.
    pub(super) fn draw(&self, now: SystemTime, area: Rect, out: &mut Buffer) {
        let sets = self.runs.get(self.of_ranks).map(ranks::of_run).unwrap_or_default();
        let most_ranks = sets.iter().map(|set| set.values.len() + 1).max().unwrap_or(0);
        // At most a quarter of the lines, so that the most are left for curves.
        let lines = |count: usize| count.min(usize::from(area.height / 4)) as u16;
        let [status, chart, bars, keys] = Layout::vertical([
            Constraint::Length(lines(self.runs.len()).max(1)),
            Constraint::Fill(1),
            Constraint::Length(lines(most_ranks)),
            Constraint::Length(u16::from(area.height > 4)),
        ])
        .areas(area);
        let lines: Vec<Line> = self.runs.iter().map(|run| Line::from(status_of(run, now))).collect();
        Paragraph::new(lines).render(status, out);
        let list_width = if area.width < WIDE { 0 } else { area.width / 3 };
        let [list, chart] =
            Layout::horizontal([Constraint::Length(list_width.min(32)), Constraint::Fill(1)]).areas(chart);
        self.draw_titles(list, out);
        curves::draw(self, chart, out);
        ranks::draw(&sets, bars, out);
        let weight = SMOOTHING[self.smoothing];
        let smooth = if weight > 0.0 { format!("smoothed by {weight}  ") } else { String::new() };
        let zoom = if self.zoom > 0 { format!("last 1/{} of the steps  ", 1u64 << self.zoom) } else { String::new() };
        Line::from(format!("{smooth}{zoom}{KEYS}")).dim().render(keys, out);
    }

    /// Draws the titles of charts, with the last value of the first run that has it. The chosen one is always there.
    fn draw_titles(&self, area: Rect, out: &mut Buffer) {
        let rows = usize::from(area.height);
        let at = self.titles.iter().position(|title| *title == self.chosen).unwrap_or(0);
        let line = |title: &String| {
            let charts = self.runs.iter().flat_map(|run| run.file.charts()).filter(|chart| chart.title == *title);
            let last = charts.flat_map(|chart| &chart.lines).find_map(|line| line.points.last());
            let text = number(title, last.map_or(f64::NAN, |point| point.1));
            let room = usize::from(area.width).saturating_sub(text.chars().count() + 3);
            let line = Line::from(format!("{:room$.room$} {text}", title));
            if *title == self.chosen { line.reversed() } else { line }
        };
        let lines: Vec<Line> = self.titles.iter().skip((at + 1).saturating_sub(rows)).map(line).collect();
        Paragraph::new(lines).render(area, out);
    }

    /// The screen of this width and height as lines of text.
    pub(super) fn to_text(&self, now: SystemTime, (width, height): (u16, u16)) -> String {
        let mut out = Buffer::empty(Rect::new(0, 0, width, height));
        self.draw(now, out.area, &mut out);
        let rows = out.content.chunks(usize::from(width).max(1));
        let text = |row: &[ratatui::buffer::Cell]| row.iter().map(|cell| cell.symbol()).collect::<String>();
        rows.map(|row| text(row).trim_end().to_owned() + "\n").collect()
    }
}

/// The state of a run in a line.
fn status_of(run: &ShownRun, now: SystemTime) -> String {
    let mut parts = Vec::new();
    match run.file.last() {
        Some(last) => {
            parts.push(format!("step {}, epoch {}", last.step, last.epoch));
            parts.extend(now.duration_since(last.time).ok().map(|age| format!("{} ago", in_words(age.as_secs()))));
        }
        None if run.file.exists() => parts.push("has no record yet".into()),
        None => parts.push(format!("waits for {}", run.file.path().display())),
    }
    parts.extend(run.file.malformed().map(|(count, why)| format!("malformed lines left out: {count}, {why}")));
    parts.extend(run.error.clone());
    format!("{}: {}", run.name, parts.join(" · "))
}
