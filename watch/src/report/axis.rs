//! Axes of charts: positions and labels of marks.

/// A range of values along an axis of `pixels` pixels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChartAxis {
    pub low: f64,
    pub high: f64,
    pub pixels: f64,
}

impl ChartAxis {
    /// The range of finite values, never empty; without values, from 0 to 1.
    pub(crate) fn over(values: impl Iterator<Item = f64>, pixels: f64) -> Self {
        let (low, high) = values
            .filter(|x| x.is_finite())
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        // Halves, because the difference of the largest numbers overflows.
        let room = if high / 2.0 - low / 2.0 > 0.0 { 0.0 } else { (high.abs() * 0.05).max(1e-6) };
        ChartAxis { low: low - room, high: high + room, pixels }
    }

    /// The position of a value, in pixels from the low end.
    pub(crate) fn at(&self, x: f64) -> f64 {
        (x / 2.0 - self.low / 2.0) / (self.high / 2.0 - self.low / 2.0) * self.pixels
    }

    /// About `count` round values.
    pub(crate) fn marks(&self, count: f64) -> Vec<f64> {
        let step = nice((self.high / count) - (self.low / count));
        let first = (self.low / step).ceil();
        (0..).map(|k| (first + f64::from(k)) * step).take_while(|x| *x <= self.high).take(50).collect()
    }
}

/// The least of 1, 2, 5, 10, 20 … times a power of ten that is at least `x`.
pub(super) fn nice(x: f64) -> f64 {
    let power = 10f64.powf(x.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|&step| step >= x * (1.0 - 1e-9)).unwrap_or(x)
}

/// A number in few characters.
pub(crate) fn label(x: f64) -> String {
    let size = x.abs();
    if x == 0.0 {
        "0".into()
    } else if (1e-3..1e5).contains(&size) {
        let text = format!("{x:.4}");
        text.trim_end_matches('0').trim_end_matches('.').into()
    } else {
        format!("{x:.1e}").replace(".0e", "e")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_and_inside() {
        for (low, high) in [(0.0, 1.0), (-3.0, 17.0), (1e-9, 3e-9), (1e300, 1.7e308), (-1.7e308, 1.7e308), (5.0, 5.0)] {
            let axis = ChartAxis::over([low, high].into_iter(), 100.0);
            let marks = axis.marks(5.0);
            assert!((2..=12).contains(&marks.len()), "{low} {high}: {marks:?}");
            assert!(marks.iter().all(|&x| (-1e-6..=100.0 + 1e-6).contains(&axis.at(x))), "{marks:?}");
        }
        assert_eq!(ChartAxis::over([0.0, 10.0].into_iter(), 100.0).marks(5.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ChartAxis::over([f64::NAN].into_iter(), 10.0).at(0.5), 5.0);
    }

    #[test]
    fn labels_are_short() {
        let labels = [0.0, 0.25, 1000.0, -2.5, 1e-5, 1.5e7, 1e5].map(label);
        assert_eq!(labels, ["0", "0.25", "1000", "-2.5", "1e-5", "1.5e7", "1e5"]);
    }
}
