//! A timeline as a picture.

use std::fmt::Write as _;

use numcore::trace::SpanKind;

use super::{RunTimeline, Track, TrackSpan};
use crate::escape::escaped;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 150.0;
const ROW: f64 = 16.0;
const GAP: f64 = 6.0;
const TOP: f64 = 24.0;
/// The least width of a drawn span, in pixels: there can be a hundred thousand of them.
const NARROWEST: f64 = 0.3;
/// The largest number of spans around a drawn span.
const DEEPEST: usize = 5;

impl RunTimeline {
    /// Draws the timeline as an SVG document, 1358 pixels wide. Each track of each rank has a band; a nested span is
    /// one line below the span around it. Time goes to the right, with marks in milliseconds.
    ///
    /// The colour gives the [kind](SpanKind) of a span, its tooltip the name, the duration in milliseconds and the
    /// bytes. Spans narrower than 0.3 pixels, or within more than 5 others, are left out. A line at the end counts them
    /// and the [overwritten](RunTimeline::lost) ones. Counters are not drawn.
    pub fn to_svg(&self) -> String {
        let (mut body, mut y, mut hidden) = (String::new(), TOP, 0);
        let scale = WIDTH / self.length.max(1) as f64;
        for rank in &self.ranks {
            for track in &rank.tracks {
                let label = format!("rank {} · {}", rank.rank, track.name);
                let _ = writeln!(body, "<text x=\"4\" y=\"{:.0}\">{}</text>", y + 12.0, escaped(&short(&label)));
                let depths = track.depths();
                hidden += draw(&mut body, track, &depths, y, scale);
                let rows = depths.iter().copied().max().unwrap_or(0).min(DEEPEST) + 1;
                y += rows as f64 * ROW + GAP;
            }
        }
        let note = format!("{hidden} spans too narrow or too deep to be seen, {} overwritten", self.lost);
        let (width, height) = (LEFT + WIDTH + 8.0, y + 20.0);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" \
             font-family=\"sans-serif\" font-size=\"11\" fill=\"currentColor\">\n{}{body}<text x=\"{LEFT}\" y=\"{:.0}\">{note}</text>\n</svg>\n",
            axis(self.length, scale, y),
            y + 12.0,
        )
    }
}

/// Draws the spans of a track; returns the number of spans left out.
fn draw(body: &mut String, track: &Track, depths: &[usize], y: f64, scale: f64) -> usize {
    let is_seen = |span: &TrackSpan, depth: usize| span.length() as f64 * scale >= NARROWEST && depth <= DEEPEST;
    let (seen, hidden): (Vec<_>, Vec<_>) =
        track.spans.iter().zip(depths).partition(|(span, depth)| is_seen(span, **depth));
    for (span, depth) in seen {
        body.push_str(&rect(span, y + *depth as f64 * ROW, scale));
    }
    hidden.len()
}

fn rect(span: &TrackSpan, y: f64, scale: f64) -> String {
    let (x, width) = (LEFT + span.start as f64 * scale, span.length() as f64 * scale);
    let name = escaped(&span.label());
    let bytes = if span.bytes > 0 { format!(", {} bytes", span.bytes) } else { String::new() };
    let milliseconds = span.length() as f64 / 1e6;
    // A name that does not fit is left out.
    let letters = (width / 6.5) as usize;
    let text = if span.label().chars().count() <= letters {
        format!("<text x=\"{:.2}\" y=\"{:.1}\" fill=\"#111\">{name}</text>", x + 2.0, y + 11.0)
    } else {
        String::new()
    };
    format!(
        "<g><title>{name}: {milliseconds:.3} ms{bytes}</title><rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{:.1}\" \
         fill=\"{}\"/>{text}</g>\n",
        ROW - 1.0,
        colour(span.kind),
    )
}

/// Marks of time above, and lines down from them.
fn axis(length: u64, scale: f64, bottom: f64) -> String {
    let step = nice(length as f64 / 8.0).max(1.0);
    let marks = (0..).map(|k| f64::from(k) * step).take_while(|at| *at <= length as f64);
    let mark = |at: f64| {
        let x = LEFT + at * scale;
        format!(
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"16\" y2=\"{bottom:.0}\" stroke=\"currentColor\" stroke-opacity=\"0.15\"/>\
             <text x=\"{x:.1}\" y=\"12\" text-anchor=\"middle\">{} ms</text>\n",
            at / 1e6
        )
    };
    marks.map(mark).collect()
}

/// The least of 1, 2, 5, 10, 20 … that is at least `x`.
fn nice(x: f64) -> f64 {
    let power = 10f64.powf(x.max(1.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|&step| step >= x).unwrap_or(x)
}

/// The label, or its beginning if it is too long for the left margin.
fn short(label: &str) -> String {
    const LETTERS: usize = 24;
    match label.char_indices().nth(LETTERS) {
        Some((at, _)) => format!("{}…", &label[..at]),
        None => label.into(),
    }
}

fn colour(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Phase => "#8fb3e0",
        SpanKind::Data => "#e0b050",
        SpanKind::Collective => "#b8a4d8",
        SpanKind::Wait => "#d88f8f",
        SpanKind::Op => "#9fcf9b",
        SpanKind::Kernel => "#5faf77",
    }
}
