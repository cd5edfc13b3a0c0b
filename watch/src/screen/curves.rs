//! Curves of one chart, of all runs over each other.

use ratatui::{
    buffer::Buffer,
    layout::{Constraint, Layout, Rect},
    style::{Color, Stylize},
    symbols::Marker,
    text::Line,
    widgets::{
        Paragraph, Widget,
        canvas::{self, Canvas, Context, Points},
    },
};

use super::{
    state::{RunScreen, SMOOTHING},
    text::number,
};
use crate::report::{
    axis::{ChartAxis, label},
    chart::thinned,
};

/// Colours that every terminal has.
const COLOURS: [Color; 6] = [Color::Cyan, Color::Yellow, Color::Green, Color::Magenta, Color::Blue, Color::Red];

/// The dots of a cell of the terminal, across and down.
const DOTS: (f64, f64) = (2.0, 4.0);

/// A curve with its name in the legend.
struct ShownCurve<'a> {
    name: String,
    points: &'a [(f64, f64)],
    colour: Color,
}

/// Draws the chosen chart: legend, axes, curves.
pub(super) fn draw(screen: &RunScreen, area: Rect, out: &mut Buffer) {
    let curves = curves(screen);
    // At most a third of the lines, so that curves are left to be seen.
    let named = curves.len().min(usize::from(area.height / 3).max(1));
    let [legend, plot] = Layout::vertical([Constraint::Length(named as u16), Constraint::Fill(1)]).areas(area);
    let rest = curves.len() - named;
    let line = |(k, curve): (usize, &ShownCurve<'_>)| {
        let more = if rest > 0 && k + 1 == named { format!("   and {rest} more") } else { String::new() };
        Line::from(vec!["━ ".fg(curve.colour), format!("{}{more}", described(curve)).into()])
    };
    let lines: Vec<Line> = curves.iter().enumerate().take(named).map(line).collect();
    Paragraph::new(lines).render(legend, out);
    draw_plot(screen, &curves, plot, out);
}

/// The curves of the chosen chart; names have the run's, if there are several.
fn curves(screen: &RunScreen) -> Vec<ShownCurve<'_>> {
    let mut curves = Vec::new();
    for run in &screen.runs {
        let prefix = if screen.runs.len() > 1 { format!("{}: ", run.name) } else { String::new() };
        let charts = run.file.charts().iter().filter(|chart| chart.title == screen.chosen);
        for line in charts.flat_map(|chart| &chart.lines) {
            let colour = COLOURS[curves.len() % COLOURS.len()];
            curves.push(ShownCurve { name: format!("{prefix}{}", line.name), points: &line.points, colour });
        }
    }
    curves
}

/// The name of a curve, its last value, and the values that no curve can show.
fn described(curve: &ShownCurve<'_>) -> String {
    let last = curve.points.last().map_or(f64::NAN, |point| point.1);
    let gaps: Vec<_> = curve.points.iter().filter(|point| !point.1.is_finite()).collect();
    let gaps = gaps
        .last()
        .map_or_else(String::new, |(step, value)| format!("   {} not finite, {value} at step {step}", gaps.len()));
    format!("{}  {}{gaps}", curve.name, number(&curve.name, last))
}

fn draw_plot(screen: &RunScreen, curves: &[ShownCurve<'_>], area: Rect, out: &mut Buffer) {
    let shown = shown_points(screen, curves);
    let finite = || shown.iter().flat_map(|(_, points)| points).filter(|point| point.1.is_finite());
    if finite().next().is_none() {
        return;
    }
    let rows = area.height.saturating_sub(1);
    let y = ChartAxis::over(finite().map(|point| point.1), (f64::from(rows) * DOTS.1 - 1.0).max(1.0));
    let marks = y.marks(f64::from(rows / 2).clamp(1.0, 8.0)).into_iter();
    let labels: Vec<(f64, String)> = marks.map(|mark| (mark, number(&screen.chosen, mark))).collect();
    let gutter = labels.iter().map(|(_, text)| text.len()).max().unwrap_or(0) as u16 + 1;
    let [_, right] = Layout::horizontal([Constraint::Length(gutter), Constraint::Fill(1)]).areas(area);
    let plot = Rect { height: rows, ..right };
    if plot.is_empty() {
        return;
    }
    let x = ChartAxis::over(finite().map(|point| point.0), f64::from(plot.width) * DOTS.0 - 1.0);
    for (mark, text) in labels {
        let row = plot.bottom() - 1 - ((y.at(mark) / DOTS.1) as u16).min(rows - 1);
        Line::from(text).right_aligned().dim().render(Rect::new(area.x, row, gutter - 1, 1), out);
    }
    draw_steps(&x, Rect { y: plot.bottom(), height: 1, ..area }, plot, out);
    draw_lines(&shown, &x, &y, plot, out);
}

/// The smoothed points of curves from the first step that is shown.
fn shown_points(screen: &RunScreen, curves: &[ShownCurve<'_>]) -> Vec<(Color, Vec<(f64, f64)>)> {
    let steps = curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.0));
    let all = ChartAxis::over(steps, 1.0);
    let from = all.high - (all.high - all.low) / f64::from(1 << screen.zoom);
    let of_curve = |curve: &ShownCurve<'_>| {
        let points = smoothed(curve.points, SMOOTHING[screen.smoothing]);
        (curve.colour, points.into_iter().filter(|point| point.0 >= from).collect())
    };
    curves.iter().map(of_curve).collect()
}

/// Draws the marks of steps into `row`, below the plot, as far as there is room between them.
fn draw_steps(x: &ChartAxis, row: Rect, plot: Rect, out: &mut Buffer) {
    let mut free = row.x;
    for mark in x.marks(f64::from(plot.width / 8).max(1.0)) {
        let (text, at) = (label(mark), plot.x + (x.at(mark) / DOTS.0) as u16);
        let width = text.len() as u16;
        let begin = at.saturating_sub(width / 2).min(row.right().saturating_sub(width));
        if begin >= free {
            free = begin + width + 1;
            Line::from(text).dim().render(Rect { x: begin, width: row.right() - begin, ..row }, out);
        }
    }
}

fn draw_lines(shown: &[(Color, Vec<(f64, f64)>)], x: &ChartAxis, y: &ChartAxis, plot: Rect, out: &mut Buffer) {
    let dots = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
        let thin = thinned(points, |at| x.at(at) as i64);
        thin.into_iter().map(|point| (x.at(point.0), y.at(point.1))).collect()
    };
    let paint = |context: &mut Context<'_>| {
        for (colour, points) in shown {
            for part in points.split(|point| !point.1.is_finite()) {
                let dots = dots(part);
                context.draw(&Points { coords: &dots, color: *colour });
                dots.windows(2).for_each(|two| {
                    context.draw(&canvas::Line::new(two[0].0, two[0].1, two[1].0, two[1].1, *colour));
                });
            }
        }
    };
    let canvas = Canvas::default().marker(Marker::Braille).x_bounds([0.0, x.pixels]).y_bounds([0.0, y.pixels]);
    canvas.paint(paint).render(plot, out);
}

/// Means of values with those before, each of which weighs `weight` times as much as the one after it. A value that is
/// not finite stays, and has no influence on others.
pub(super) fn smoothed(points: &[(f64, f64)], weight: f64) -> Vec<(f64, f64)> {
    let (mut sum, mut total) = (0.0, 0.0);
    let mean = |&(x, value): &(f64, f64)| {
        if !value.is_finite() {
            return (x, value);
        }
        (sum, total) = (weight * sum + (1.0 - weight) * value, weight * total + 1.0 - weight);
        (x, sum / total)
    };
    points.iter().map(mean).collect()
}
