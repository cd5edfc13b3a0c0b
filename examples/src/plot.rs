//! The loss as a picture.

use std::{error::Error, path::Path};

use plotters::prelude::*;

/// One line of a picture: its name and its points.
pub type Curve<'a> = (&'a str, &'a [(f64, f64)]);

/// Writes curves over the step as SVG.
pub fn losses(path: &Path, title: &str, curves: &[Curve<'_>]) -> Result<(), Box<dyn Error>> {
    let points = || curves.iter().flat_map(|(_, c)| c.iter().copied()).filter(|p| p.1.is_finite());
    let steps = points().map(|p| p.0).fold(1.0, f64::max);
    let (low, high) = points().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), p| (l.min(p.1), h.max(p.1)));
    if !low.is_finite() {
        return Ok(());
    }
    let margin = (0.05 * (high - low)).max(1e-3);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (800, 500)).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 22))
            .margin(16)
            .x_label_area_size(40)
            .y_label_area_size(55)
            .build_cartesian_2d(0.0..steps, low - margin..high + margin)?;
        chart.configure_mesh().x_desc("step").y_desc("loss").draw()?;
        for (i, (name, points)) in curves.iter().enumerate() {
            let color = Palette99::pick(i).to_rgba();
            chart
                .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?
                .label(*name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color));
        }
        chart.configure_series_labels().border_style(BLACK).background_style(WHITE).draw()?;
        area.present()?;
    }
    std::fs::write(path, svg)?;
    Ok(())
}
