//! [`Chart`]: lines over an axis, as SVG.

use std::fmt::Write as _;

use super::axis::{ChartAxis, label};
use crate::escape::escaped;

/// Lines over a common axis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chart {
    /// The title above the chart.
    pub title: String,
    /// The label of the horizontal axis: `step`.
    pub x_label: String,
    /// The lines, in the order of the legend.
    pub lines: Vec<ChartLine>,
}

/// A line of a chart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChartLine {
    /// The line's name in the legend.
    pub name: String,
    /// Points from left to right. The line has a gap at a value that is NaN or infinite.
    pub points: Vec<(f64, f64)>,
}

pub(super) const WIDTH: f64 = 560.0;
pub(super) const HEIGHT: f64 = 300.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 36.0;

/// Colours that any colour vision tells apart, on white and on black (Okabe and Ito).
pub(super) const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// The frame of a chart: axes with marks, lines through them, the title.
pub(super) struct Frame {
    pub x: ChartAxis,
    pub y: ChartAxis,
}

impl Frame {
    pub(super) fn over(xs: impl Iterator<Item = f64>, ys: impl Iterator<Item = f64>) -> Self {
        Frame { x: ChartAxis::over(xs, WIDTH - LEFT - RIGHT), y: ChartAxis::over(ys, HEIGHT - TOP - BOTTOM) }
    }

    /// The position of a point in the picture.
    pub(super) fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        (LEFT + self.x.at(x), HEIGHT - BOTTOM - self.y.at(y))
    }

    /// The picture around `body`. Names stand below the title, each in its colour.
    pub(super) fn around(&self, title: &str, x_label: &str, names: &[String], body: &str) -> String {
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"11\" fill=\"currentColor\">\n\
             <text x=\"{LEFT}\" y=\"14\" font-size=\"13\" font-weight=\"bold\">{}</text>\n",
            escaped(title)
        );
        for y in self.y.marks(5.0) {
            let (_, at) = self.at((self.x.low, y));
            let (right, text) = (WIDTH - RIGHT, LEFT - 6.0);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"currentColor\" stroke-opacity=\"0.15\"/>\
                 <text x=\"{text}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                at + 4.0,
                label(y)
            );
        }
        for x in self.x.marks(6.0) {
            let (at, _) = self.at((x, self.y.low));
            let y = HEIGHT - BOTTOM + 14.0;
            let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", label(x));
        }
        let (middle, foot) = (LEFT + (WIDTH - LEFT - RIGHT) / 2.0, HEIGHT - 6.0);
        let _ = writeln!(svg, "<text x=\"{middle}\" y=\"{foot}\" text-anchor=\"middle\">{}</text>", escaped(x_label));
        svg + &legend(names) + body + "</svg>\n"
    }
}

/// Names beside each other, as many as fit.
fn legend(names: &[String]) -> String {
    const LETTER: f64 = 6.2;
    let (mut x, mut out) = (LEFT, String::new());
    for (name, colour) in names.iter().zip(COLOURS.iter().cycle()) {
        let width = 22.0 + LETTER * name.chars().count() as f64;
        if x + width > WIDTH && x > LEFT {
            break;
        }
        let _ = writeln!(
            out,
            "<rect x=\"{x:.0}\" y=\"25\" width=\"10\" height=\"3\" fill=\"{colour}\"/><text x=\"{:.0}\" y=\"30\">{}</text>",
            x + 14.0,
            escaped(name)
        );
        x += width;
    }
    out
}

impl Chart {
    /// Draws the chart as a picture of 560 × 300. Text has the page's text colour, so it is visible on dark pages too.
    pub fn to_svg(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| line.points.iter().filter(|p| p.1.is_finite()));
        let frame = Frame::over(points().map(|p| p.0), points().map(|p| p.1));
        let names: Vec<String> = self.lines.iter().map(|line| line.name.clone()).collect();
        let lines = self.lines.iter().zip(COLOURS.iter().cycle());
        let body: String = lines.map(|(line, colour)| line.to_path(&frame, colour)).collect();
        frame.around(&self.title, &self.x_label, &names, &body)
    }
}

impl ChartLine {
    fn to_path(&self, frame: &Frame, colour: &str) -> String {
        let mut path = String::new();
        let mut alone = String::new();
        for run in self.points.split(|p| !p.1.is_finite() || !p.0.is_finite()) {
            match run {
                [] => {}
                // A line of one point is invisible.
                [only] => {
                    let (x, y) = frame.at(*only);
                    let _ = write!(alone, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2\" fill=\"{colour}\"/>");
                }
                run => {
                    for (k, point) in thinned(run, |x| frame.x.at(x) as i64).into_iter().enumerate() {
                        let (x, y) = frame.at(point);
                        let _ = write!(path, "{}{x:.1} {y:.1}", if k == 0 { 'M' } else { 'L' });
                    }
                }
            }
        }
        format!(
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\" stroke-linejoin=\"round\"><title>{}</title></path>{alone}\n",
            escaped(&self.name)
        )
    }
}

/// The first, least, greatest and last point of every column of pixels, which cover as much as a line through all
/// points. `column` gives the column of a position `x`.
pub(crate) fn thinned(points: &[(f64, f64)], column: impl Fn(f64) -> i64) -> Vec<(f64, f64)> {
    let mut kept = Vec::new();
    for group in points.chunk_by(|a, b| column(a.0) == column(b.0)) {
        let mut extremes: Vec<usize> = [0, least(group, 1.0), least(group, -1.0), group.len() - 1].into();
        extremes.sort_unstable();
        extremes.dedup();
        kept.extend(extremes.into_iter().map(|i| group[i]));
    }
    kept
}

fn least(points: &[(f64, f64)], sign: f64) -> usize {
    (0..points.len()).min_by(|&a, &b| (sign * points[a].1).total_cmp(&(sign * points[b].1))).unwrap_or(0)
}
