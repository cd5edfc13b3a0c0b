//! Reports hold what was measured, need nothing else, and obey nothing that they show.

use std::{
    fs,
    time::{Duration, SystemTime},
};

use crate::folder::Folder;
use watch::{
    recorder::{CounterSeries, RankTimeline, RunTimeline},
    report::{Chart, ChartLine, HtmlReport, Report, SvgCurves, charts_of},
    sink::{Histogram, Picture, Record, Sink, Value},
};

const ATTACK: &str = "<script>alert('x')</script>\"&";

/// Every element is closed, in order: what a browser's XML parser would say.
fn is_well_formed(svg: &str) -> bool {
    let (mut open, mut rest): (Vec<&str>, &str) = (Vec::new(), svg);
    while let Some((_, after)) = rest.split_once('<') {
        let Some((tag, after)) = after.split_once('>') else { return false };
        rest = after;
        if tag.contains('<') {
            return false;
        }
        match (tag.strip_prefix('/'), tag.ends_with('/')) {
            (Some(name), _) if open.pop() != Some(name) => return false,
            (None, false) => open.push(tag.split_whitespace().next().unwrap_or("")),
            _ => {}
        }
    }
    open.is_empty()
}

fn records() -> Vec<Record> {
    let loss = |step: u64| 3.0 / step as f64;
    let record = |step| Record::new(step, 0).scalar("train/loss", loss(step)).scalar("lr", 3e-4);
    let validated = |r: Record| match r.step.is_multiple_of(5) {
        true => r.clone().scalar("validation/loss", loss(r.step) + 0.1),
        false => r,
    };
    (1..=20).map(record).map(validated).collect()
}

#[test]
fn names_that_end_alike_share_a_chart() {
    let charts = charts_of(&records());
    let told: Vec<(&str, Vec<(&str, usize)>)> = charts
        .iter()
        .map(|c| (c.title.as_str(), c.lines.iter().map(|l| (l.name.as_str(), l.points.len())).collect()))
        .collect();
    assert_eq!(told, [("loss", vec![("train/loss", 20), ("validation/loss", 4)]), ("lr", vec![("lr", 20)])]);
}

#[test]
fn lines_have_gaps_where_values_are_not_finite() {
    let line = |values: &[f64]| {
        let points = values.iter().enumerate().map(|(x, y)| (x as f64, *y)).collect();
        Chart { title: "t".into(), x_label: "step".into(), lines: vec![ChartLine { name: "l".into(), points }] }
            .to_svg()
    };
    let svg = line(&[1.0, 2.0, f64::NAN, 3.0, f64::INFINITY, 1.0, 2.0, 3.0]);
    assert!(is_well_formed(&svg));
    assert_eq!((svg.matches('M').count(), svg.matches("<circle").count()), (2, 1), "two runs and a point alone");
    for values in [&[][..], &[f64::NAN], &[1.0], &[f64::MAX, f64::MIN], &[0.0, 0.0], &[1e-300, 2e-300]] {
        let svg = line(values);
        assert!(is_well_formed(&svg) && !svg.contains("NaN") && !svg.contains("inf"), "{values:?}: {svg}");
    }
    // A hundred thousand points are drawn as what is seen of them, the extremes among it.
    let mut many = vec![0.0; 100_000];
    many[54_321] = 1.0;
    let svg = line(&many);
    assert!(svg.len() < 100_000, "{} bytes", svg.len());
    assert!(svg.contains(" 40.0L"), "the peak is at the top");
}

#[test]
fn a_page_holds_everything_and_obeys_nothing() {
    let mut all = records();
    let sample = all.pop().unwrap().scalar(ATTACK, 1.0).with("sample", Value::Text(ATTACK.into()));
    let sample = sample.with(format!("h{ATTACK}"), Value::Histogram(Histogram::of(&[0.1f32, 0.2, f32::NAN])));
    all.push(sample.with("picture", Value::Image(Picture::new(2, 2, 3, vec![9; 12]).unwrap())));
    let counter = |name: &str| CounterSeries { name: name.into(), points: vec![(0, 5 << 20), (500, 0)] };
    let rank = RankTimeline { rank: 2, tracks: Vec::new(), counters: vec![counter("gradients"), counter("cpu %")] };
    let page = Report::new(ATTACK)
        .configuration([("lr", ATTACK)])
        .records(&all)
        .text(ATTACK, ATTACK)
        .timeline(RunTimeline { ranks: vec![rank], length: 1000, lost: 0 })
        .to_html();
    assert!(!page.contains("<script") && !page.contains("alert('x')"));
    for part in ["Configuration", "Curves", "Numbers", "Samples", "Timeline", "Memory", "memory of rank 2", "20"] {
        assert!(page.contains(part), "{part}");
    }
    assert!(page.contains("&lt;script&gt;") && page.contains("data:image/png;base64,iVBORw0KGgo"));
    assert!(page.contains("Content-Security-Policy\" content=\"default-src 'none'"));
    let links = ["http://", "https://", "src=\"//", "@import", "url("];
    let outside: Vec<&str> =
        links.into_iter().filter(|link| page.replace("http://www.w3.org/2000/svg", "").contains(link)).collect();
    assert!(outside.is_empty(), "{outside:?}");
    let bodies = page.split("<svg").skip(1).filter_map(|rest| rest.split_once("</svg>"));
    let svgs: Vec<String> = bodies.map(|(svg, _)| format!("<svg{svg}</svg>")).collect();
    assert!(svgs.len() >= 5 && svgs.iter().all(|svg| is_well_formed(svg)));
}

#[test]
fn the_last_samples_are_shown() {
    let text = |step| Record::new(step, 0).with("sample", Value::Text(format!("of {step}")));
    let html = Report::new("run").records(&(1..=7).map(text).collect::<Vec<_>>()).to_html();
    let shown: Vec<u64> = (1..=7).filter(|step| html.contains(&format!("<pre>of {step}</pre>"))).collect();
    assert_eq!(shown, [3, 4, 5, 6, 7]);
}

#[test]
fn an_empty_report_is_a_page() {
    let page = Report::new("nothing").to_html();
    assert!(page.contains("<h1>nothing</h1>") && !page.contains("<h2>"));
}

#[test]
fn sinks_write_files_that_are_replaced() {
    let folder = Folder::new("report");
    let path = folder.path("a/b/report.html");
    let mut page = HtmlReport::at(&path, Report::new("run"));
    let mut curves = SvgCurves::in_folder(folder.path("a"));
    for (k, record) in records().iter().enumerate() {
        page.write(record).unwrap();
        curves.write(record).unwrap();
        if k % 10 == 9 {
            page.flush().unwrap();
            curves.flush().unwrap();
            assert!(fs::read_to_string(&path).unwrap().contains(&format!("Steps 1 to {}", k + 1)));
        }
    }
    let svg = fs::read_to_string(folder.path("a/curves.svg")).unwrap();
    assert!(is_well_formed(&svg) && svg.contains("validation/loss"));
    let occupied = folder.file("occupied", "a file");
    for error in [
        HtmlReport::at(occupied.join("x.html"), Report::new("run")).flush().unwrap_err(),
        SvgCurves::in_folder(&occupied).flush().unwrap_err(),
    ] {
        assert!(error.to_string().contains("occupied"), "{error}");
    }
}

#[test]
fn a_live_page_is_written_at_once_and_at_intervals_and_reloads_until_the_end() {
    let folder = Folder::new("live-report");
    let path = folder.path("run.html");
    let mut page = HtmlReport::at(&path, Report::new("run")).live(Duration::from_secs(5));
    let shown = || fs::read_to_string(&path).unwrap();
    for (second, last) in [(0, 0), (1, 0), (4, 0), (5, 5), (9, 5), (20, 20)] {
        let mut record = Record::new(second, 0).scalar("loss", 1.0);
        record.time = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        page.write(&record).unwrap();
        assert!(shown().contains(&format!("Steps 0 to {last}, ")), "after {second} s");
        assert!(shown().contains("<meta http-equiv=\"refresh\" content=\"5\">"));
    }
    page.write(&Record::new(21, 0).scalar("loss", 0.5)).unwrap();
    drop(page);
    assert!(shown().contains("Steps 0 to 21") && !shown().contains("http-equiv=\"refresh\""));
    // A page that is not live is written when it is flushed, and never reloads.
    let quiet = folder.path("quiet.html");
    HtmlReport::at(&quiet, Report::new("run")).write(&Record::new(1, 0)).unwrap();
    assert!(!quiet.exists());
}

#[test]
fn steps_that_were_measured_again_take_the_place_of_the_first_ones() {
    let loss = |step: u64, x: f64| Record::new(step, 0).scalar("loss", x);
    let before: Vec<Record> = (1..=6).map(|step| loss(step, 9.0)).collect();
    let again: Vec<Record> = (4..=7).map(|step| loss(step, 1.0)).collect();
    let charts = charts_of(&[before.clone(), again.clone()].concat());
    let points = &charts[0].lines[0].points;
    assert_eq!(points[..], [(1.0, 9.0), (2.0, 9.0), (3.0, 9.0), (4.0, 1.0), (5.0, 1.0), (6.0, 1.0), (7.0, 1.0)]);
    // A run that goes on has the curves of the whole.
    let folder = Folder::new("curves-again");
    let mut whole = SvgCurves::in_folder(folder.path("whole"));
    [&before[..3], &again].concat().iter().for_each(|record| whole.write(record).unwrap());
    let mut resumed = SvgCurves::in_folder(folder.path("resumed")).records(&before);
    again.iter().for_each(|record| resumed.write(record).unwrap());
    whole.flush().unwrap();
    resumed.flush().unwrap();
    let [whole, resumed] =
        ["whole", "resumed"].map(|name| fs::read_to_string(folder.path(name).join("curves.svg")).unwrap());
    assert_eq!(resumed, whole);
}
