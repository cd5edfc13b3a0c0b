//! Screens of files with known contents.

use std::{
    fs,
    io::Write,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers},
};

use super::{curves::smoothed, run, state::RunScreen};
use crate::sink::{Jsonl, Record, Sink};

/// A folder that is removed when it is dropped.
struct Runs(PathBuf);

impl Runs {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("weftgrad-watch-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Runs(folder)
    }

    /// Writes a run: a record for each step, at that second.
    fn write(&self, run: &str, steps: impl IntoIterator<Item = (u64, Vec<(&'static str, f64)>)>) -> PathBuf {
        let folder = self.0.join(run);
        let mut sink = Jsonl::in_folder(&folder).unwrap();
        for (step, values) in steps {
            let record = values.into_iter().fold(Record::new(step, 0), |record, (name, x)| record.scalar(name, x));
            sink.write(&Record { time: at(step), ..record }).unwrap();
        }
        folder
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn at(second: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(second)
}

fn screen(runs: &[PathBuf]) -> RunScreen {
    let mut screen = RunScreen::of(runs);
    screen.read();
    screen
}

fn press(screen: &mut RunScreen, key: KeyCode) {
    assert!(screen.press(key.into()).is_continue());
}

fn press_all<const N: usize>(screen: &mut RunScreen, keys: [KeyCode; N]) {
    keys.into_iter().for_each(|key| press(screen, key));
}

/// Losses of 8 down to 1 with a gap, and values of ranks.
fn first(steps: u64) -> impl Iterator<Item = (u64, Vec<(&'static str, f64)>)> {
    (1..=steps).map(|step| {
        let loss = if step == 6 { f64::NAN } else { (9 - step.min(8)) as f64 };
        let mut values = vec![("grad_norm", 0.5), ("loss", loss)];
        values.extend([("rank/0/lag_seconds", 0.02), ("rank/1/lag_seconds", 0.0), ("rank/2/lag_seconds", 0.01)]);
        values.extend([("rank/0/peak_bytes", 3e9), ("rank/1/peak_bytes", 2e9), ("rank/2/peak_bytes", 1e9)]);
        (step, values)
    })
}

/// The lines of a screen as it stands in the sources, each after a `|`.
fn lines(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.split_once('|')).map(|(_, line)| line).collect()
}

fn shown(screen: &RunScreen, size: (u16, u16)) -> String {
    screen.to_text(at(11), size)
}

#[test]
fn a_run_is_a_curve_with_gaps_and_bars_of_ranks() {
    let runs = Runs::new("screen");
    let screen = screen(&[runs.write("a", first(8))]);
    let text = shown(&screen, (64, 18));
    let expected = "
        |a: step 8, epoch 0 · 3 s ago
        |loss              1  ━ loss  1   1 not finite, NaN at step 6
        |grad_norm       0.5  8 ⠉⠒⠤⣀
        |lag_seconds    0.02        ⠉⠒⠤⣀
        |peak_bytes  2.8 GiB            ⠉⠒⠤⣀⡀
        |                     6             ⠈⠑⠢⢄⡀
        |                                       ⠈⠑⠢⢄⡀
        |                     4                     ⠈⠑⠢⠄
        |
        |
        |                     2                                   ⠐⠢⢄⡀
        |                                                            ⠈⠑⠢⢄
        |                            2           4          6           8
        |lag_seconds of ranks             peak_bytes of ranks
        |0 ████████████████████████ 0.02  0 ███████████████████   2.8 GiB
        |1                             0  1 █████████████         1.9 GiB
        |2 ████████████             0.01  2 ██████              953.7 MiB
        |↑↓ curve  s smooth  +- zoom  Tab run of ranks  q quit
    ";
    assert_eq!(text.lines().collect::<Vec<_>>(), lines(expected), "{text}");
}

#[test]
fn runs_are_over_each_other_and_one_that_has_not_begun_is_waited_for() {
    let runs = Runs::new("several");
    let folders =
        [runs.write("a", first(8)), runs.write("b", (3..=5).map(|k| (k, vec![("loss", k as f64)]))), runs.0.join("c")];
    let screen = screen(&folders);
    let text = shown(&screen, (40, 12));
    let expected = "
        |a: step 8, epoch 0 · 3 s ago
        |b: step 5, epoch 0 · 6 s ago
        |c: waits for runs/c/metrics.jsonl
        |━ a: loss  1   1 not finite, NaN at step
        | ⠉⠑⠒⠒⠢⠤⠤⠤⢄⣀⣀⣀⡀
        |             ⢈⣉⣉⡱⠶⠶⠶⠶⠶⠶⠆
        |            ⠉⠁                    ⠒⠢⠤⠤⢄⣀
        |      2          4          6          8
        |lag_seconds of ranks, the highest of 3
        |0 █████████████████████████████████ 0.02
        |2 █████████████████                 0.01
        |↑↓ curve  s smooth  +- zoom  Tab run of
    ";
    let waits = format!("c: waits for {}", runs.0.join("c/metrics.jsonl").display());
    let expected = expected.replace("c: waits for runs/c/metrics.jsonl", &waits.chars().take(40).collect::<String>());
    assert_eq!(text.lines().collect::<Vec<_>>(), lines(&expected), "{text}");
}

#[test]
fn keys_choose_what_is_shown() {
    let runs = Runs::new("keys");
    let mut screen = screen(&[runs.write("a", first(16)), runs.write("b", [(1, vec![("other", 1.0)])])]);
    assert_eq!(screen.titles, ["loss", "grad_norm", "lag_seconds", "peak_bytes", "other"]);
    press(&mut screen, KeyCode::Down);
    assert_eq!(screen.chosen, "grad_norm");
    press_all(&mut screen, [KeyCode::Up, KeyCode::Char('k')]);
    assert_eq!(screen.chosen, "other");
    press_all(&mut screen, [KeyCode::Right, KeyCode::Char('j'), KeyCode::Left]);
    assert_eq!(screen.chosen, "loss");
    // The last quarter of steps 1 to 16 begins at 12.25, and has losses of 1 alone.
    press_all(&mut screen, [KeyCode::Char('+'), KeyCode::Char('=')]);
    let text = shown(&screen, (50, 12));
    assert!(text.contains("last 1/4 of the steps") && !text.contains("  5 ") && text.contains("  14 "), "{text}");
    press_all(&mut screen, [KeyCode::Char('-'); 20]);
    assert_eq!(screen.zoom, 0);
    press(&mut screen, KeyCode::Char('s'));
    assert!(shown(&screen, (80, 12)).contains("smoothed by 0.6"));
    press_all(&mut screen, [KeyCode::Char('s'); 3]);
    assert_eq!(screen.smoothing, 0);
    // The second run has no values of ranks.
    assert!(shown(&screen, (80, 16)).contains("lag_seconds of ranks"));
    press(&mut screen, KeyCode::Tab);
    assert!(!shown(&screen, (80, 16)).contains("of ranks\n"));
    let control = |c| KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL);
    assert!(screen.press(control('c')).is_break() && screen.press(KeyCode::Esc.into()).is_break());
    // Nothing to choose from.
    let mut nothing = RunScreen::of(&[]);
    press_all(&mut nothing, [KeyCode::Up, KeyCode::Down, KeyCode::Tab, KeyCode::Char('x')]);
}

#[test]
fn the_screen_follows_the_file_and_the_size_until_a_key_ends_it() {
    let runs = Runs::new("loop");
    let folder = runs.0.join("a");
    let mut screen = screen(std::slice::from_ref(&folder));
    let mut terminal = Terminal::new(TestBackend::new(40, 6)).unwrap();
    let mut asked = 0;
    let next = || {
        asked += 1;
        Ok(match asked {
            1 => {
                runs.write("a", first(2));
                None
            }
            2 => Some(Event::Resize(50, 7)),
            3 => Some(Event::Key(KeyCode::Down.into())),
            4 => {
                runs.write("a", [(3, vec![("loss", 2.5)])]);
                None
            }
            _ => Some(Event::Key(KeyCode::Char('q').into())),
        })
    };
    run(&mut terminal, &mut screen, next, || at(5)).unwrap();
    assert_eq!((asked, screen.chosen.as_str()), (5, "grad_norm"));
    let first = terminal.backend().buffer().content.chunks(40).next().unwrap();
    let text: String = first.iter().map(|cell| cell.symbol()).collect();
    assert_eq!(text.trim_end(), "a: step 3, epoch 0 · 2 s ago");
    // A terminal that fails is an error.
    let error = run(&mut terminal, &mut screen, || Err(std::io::Error::other("gone")), || at(5)).unwrap_err();
    assert!(error.to_string().contains("terminal: gone"), "{error}");
}

#[test]
fn a_line_that_is_cut_or_malformed_is_told_and_disturbs_nothing() {
    let runs = Runs::new("malformed");
    let folder = runs.write("a", first(3));
    let file = folder.join("metrics.jsonl");
    let before = fs::read(&file).unwrap();
    let add = |text: &str| fs::OpenOptions::new().append(true).open(&file).unwrap().write_all(text.as_bytes()).unwrap();
    add("{}\n{\"step\":4,");
    let mut screen = screen(std::slice::from_ref(&file));
    let text = shown(&screen, (120, 10));
    assert!(
        text.starts_with("a: step 3, epoch 0 · 8 s ago · malformed lines left out: 1, line 4: is no object"),
        "{text}"
    );
    assert!(fs::read(&file).unwrap().starts_with(&before));
    // What was read stays on the screen when the file cannot be read.
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    screen.read();
    let text = shown(&screen, (200, 10));
    assert!(text.starts_with("a: step 3, ") && text.contains("metrics.jsonl: Is a directory"), "{text}");
}

#[test]
fn no_spike_is_lost_and_no_value_breaks_a_screen_of_any_size() {
    let runs = Runs::new("spike");
    let spike = |step| vec![("loss", if step == 4321 { 9.0 } else { 1.0 })];
    let spiked = screen(&[runs.write("a", (1..=10_000).map(|step| (step, spike(step))))]);
    let text = shown(&spiked, (40, 10));
    assert!(text.lines().nth(2).unwrap().contains(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "{text}");
    let odd = [f64::MAX, f64::MIN, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 5e-324];
    let values = |step: u64| {
        let x = odd[step as usize % 8];
        vec![
            ("loss", x),
            ("\u{1b}[31m\n\u{7}", x),
            ("a name with wide letters 漢字漢字漢字漢字漢字", -x),
            ("rank/0/bytes", x),
            ("rank/18446744073709551615/bytes", x),
        ]
    };
    let mut odd = screen(&[runs.write("odd", (0..20).map(|step| (step, values(step)))), "".into(), "..".into()]);
    let mut alone =
        screen(&[runs.write("alone", [(7, vec![("loss", 3.0), ("rank/x/loss", 1.0), ("rank/1/nan", f64::NAN)])])]);
    for screen in [&mut odd, &mut alone] {
        for _ in 0..3 {
            for (width, height) in
                (0..9).flat_map(|w| (0..17).map(move |h| (w * w, h))).chain([(300, 60), (1, 500), (900, 1)])
            {
                let text = shown(screen, (width, height));
                assert!(text.lines().count() == usize::from(if width > 0 { height } else { 0 }), "{width} {height}");
                assert!(!text.contains(['\u{1b}', '\u{7}']), "nothing on the screen is obeyed");
            }
            press_all(screen, [KeyCode::Down, KeyCode::Char('s'), KeyCode::Char('+')]);
        }
    }
}

#[test]
fn the_ranks_with_the_highest_values_are_shown_if_not_all_fit() {
    let runs = Runs::new("ranks");
    let names: Vec<String> = (0..100).map(|rank| format!("rank/{rank}/lag_seconds")).collect();
    let record = names.iter().enumerate().fold(Record::new(1, 0), |r, (k, name)| r.scalar(name, (k * 37 % 100) as f64));
    let folder = runs.0.join("a");
    Jsonl::in_folder(&folder).unwrap().write(&record).unwrap();
    let text = shown(&screen(&[folder]), (48, 16));
    let rows: Vec<&str> = text.lines().skip(11).collect();
    let expected = [
        "lag_seconds of ranks, the highest of 100",
        "27 ██████████████████████████████████████████ 99",
        "54 ██████████████████████████████████████████ 98",
        "81 █████████████████████████████████████████  97",
    ];
    assert_eq!(rows[..4], expected, "{text}");
}

#[test]
fn ranks_are_in_order_and_one_without_an_end_leaves_the_bars_of_others() {
    let runs = Runs::new("order");
    let record = (0..12).fold(Record::new(1, 0), |r, k| r.scalar(format!("rank/{k}/lag_seconds"), 1.0));
    let folder = runs.0.join("a");
    let write = |record: &Record| Jsonl::in_folder(&folder).unwrap().write(record).unwrap();
    write(&record.scalar("rank/3/lag_seconds", f64::INFINITY).scalar("rank/4/lag_seconds", f64::NAN));
    let text = shown(&screen(std::slice::from_ref(&folder)), (24, 60));
    let rows: Vec<&str> = text.lines().skip(47).take(6).collect();
    let expected = [
        " 0 █████████████████   1",
        " 1 █████████████████   1",
        " 2 █████████████████   1",
        " 3 █████████████████ inf",
        " 4                   NaN",
        " 5 █████████████████   1",
    ];
    assert_eq!(rows, expected, "{text}");
    assert!(text.lines().nth(58).unwrap().starts_with("11 █"), "{text}");
}

#[test]
fn an_infinite_value_is_a_gap_as_nan_is() {
    let runs = Runs::new("infinite");
    let pictures = [("a", f64::NAN), ("b", f64::INFINITY), ("c", f64::NEG_INFINITY)].map(|(name, gap)| {
        let loss = |step| vec![("loss", if step == 3 { gap } else { step as f64 })];
        let text = shown(&screen(&[runs.write(name, (1..=6).map(|step| (step, loss(step))))]), (40, 14));
        let legend = format!("━ loss  6   1 not finite, {gap} at step 3");
        assert_eq!(text.lines().nth(1), Some(&*legend));
        text.lines().skip(2).map(String::from).collect::<Vec<_>>()
    });
    assert!(pictures[0] == pictures[1] && pictures[0] == pictures[2], "{pictures:?}");
}

#[test]
fn where_there_is_little_room_the_chosen_title_is_seen_and_no_text_is_over_another() {
    let runs = Runs::new("narrow");
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
    let values = |step: u64| (step, names.map(|name| (name, 0.5)).to_vec());
    let mut screen = screen(&[runs.write("a", [values(1000), values(2000)])]);
    press_all(&mut screen, [KeyCode::Up]);
    let text = shown(&screen, (60, 8));
    let titles: Vec<&str> = text.lines().skip(1).take(6).map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(titles, ["d", "e", "f", "g", "h", "i"], "{text}");
    let text = shown(&screen, (10, 12));
    assert_eq!(text.lines().nth(10), Some("   1000"), "{text}");
}

#[test]
fn smoothing_weighs_values_and_leaves_gaps() {
    let points: Vec<(f64, f64)> =
        [4.0, 2.0, f64::NAN, 1.0].into_iter().enumerate().map(|(k, x)| (k as f64, x)).collect();
    let means: Vec<f64> = smoothed(&points, 0.5).into_iter().map(|point| point.1).collect();
    assert_eq!((means[0], means[1], means[3]), (4.0, (2.0 + 2.0) / 1.5, (1.0 + 1.0 + 1.0) / 1.75));
    assert!(means[2].is_nan());
    assert_eq!(smoothed(&points[..2], 0.0), points[..2]);
}
