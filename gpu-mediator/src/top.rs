//! Watches an arbiter: shows a table of its clients, updated once a second.
//!
//! This is a separate binary, `gantry-top`, which `gantry top` executes: `gantry` is close to its
//! size limit, and a virtual machine's process has no use for terminal code.

use std::{
    io, mem,
    path::Path,
    time::{Duration, Instant},
};

use ratatui::{
    DefaultTerminal, Frame,
    crossterm::{
        event::{self, Event, KeyCode, KeyModifiers},
        terminal::is_raw_mode_enabled,
    },
    layout::{Constraint, Layout},
    style::{Color, Modifier, Style},
    text::Line,
    widgets::{Cell, Row, Table},
};

use remoting_turns::weight;

use crate::status::{self, Client, Status};

/// Interval at which the figures are fetched.
const PERIOD: Duration = Duration::from_secs(1);

/// One client's figures over the time between two samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// The client at the later sample.
    pub client: Client,
    /// Its share of the device time that was used.
    pub share: f64,
    /// The share that its weight entitles it to, among those that used or wanted the device.
    pub due: f64,
    /// Fraction of the time for which it waited for the device; can exceed one with several
    /// workers.
    pub queueing: f64,
    /// Requests per second.
    pub calls: f64,
}

/// Computes what happened between two samples. A client that is not in the first sample started
/// from zero; so did all clients if the arbiter was restarted in between.
pub fn figures(before: &Status, after: &Status) -> Vec<Figures> {
    let restarted = after.uptime < before.uptime;
    let elapsed = if restarted {
        after.uptime
    } else {
        after.uptime - before.uptime
    };
    let seconds = (elapsed as f64 / 1e9).max(1e-9);
    let nothing = Client::default();
    let changes: Vec<(&Client, &Client)> = after
        .clients
        .iter()
        .map(|client| {
            let known = before.clients.iter().find(|old| old.name == client.name);
            (known.filter(|_| !restarted).unwrap_or(&nothing), client)
        })
        .collect();
    let time = |(old, new): &(&Client, &Client)| new.device_time.saturating_sub(old.device_time);
    let waited =
        |(old, new): &(&Client, &Client)| new.queueing_time.saturating_sub(old.queueing_time);
    let total: u64 = changes.iter().map(time).sum();
    let weights: u64 = changes
        .iter()
        .filter(|change| time(change) + waited(change) > 0)
        .map(|(_, new)| u64::from(new.weight))
        .sum();
    let part = |of: u64, all: u64| of as f64 / all.max(1) as f64;
    changes
        .iter()
        .map(|change| {
            let active = time(change) + waited(change) > 0;
            let (old, new) = change;
            Figures {
                client: (*new).clone(),
                share: part(time(change), total),
                due: if active {
                    part(new.weight.into(), weights)
                } else {
                    0.0
                },
                queueing: waited(change) as f64 / 1e9 / seconds,
                calls: new.calls.saturating_sub(old.calls) as f64 / seconds,
            }
        })
        .collect()
}

/// Formats bytes with three digits.
fn bytes(number: u64) -> String {
    let mut value = number as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1000.0 {
            return format!("{value:.0} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// Nanoseconds as milliseconds.
fn millis(nanos: u64) -> String {
    format!("{:8.2}", nanos as f64 / 1e6)
}

/// Draws the clients.
fn draw(frame: &mut Frame<'_>, status: &Status, rows: &[Figures], complaint: Option<&str>) {
    let [head, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let beside = rows.iter().filter(|row| row.client.beside).count();
    let mut title = format!(
        "gantry-top: policy {}, up {} s, {} clients",
        status.policy,
        status.uptime / 1_000_000_000,
        rows.len()
    );
    if beside > 0 {
        title += &format!(", of which {beside} not shared by weight: no share holds");
    }
    frame.render_widget(Line::from(title).style(Modifier::BOLD), head);
    let percent = |part: f64| format!("{:5.1} %", part * 100.0);
    let table = rows.iter().map(|row| {
        let client = &row.client;
        // Highlights clients that wait and get less than nine tenths of their due share.
        let short = row.share < row.due * 0.9 && row.queueing > 0.1;
        let style = if short {
            Style::new().fg(Color::Red)
        } else if client.holds {
            Style::new().fg(Color::Green)
        } else {
            Style::new()
        };
        Row::new([
            Cell::from(client.name.clone()),
            Cell::from(weight::text(client.weight)),
            Cell::from(match client.beside {
                true => "unknown".to_owned(),
                false => percent(row.share),
            }),
            Cell::from(percent(row.due)),
            Cell::from(percent(row.queueing)),
            Cell::from(millis(client.waits.p50)),
            Cell::from(millis(client.waits.p99)),
            Cell::from(millis(client.waits.longest)),
            Cell::from(format!("{:.0}", row.calls)),
            Cell::from(bytes(client.memory)),
            Cell::from(client.workers.to_string()),
            Cell::from(client.killed.to_string()),
            Cell::from(match &client.delay {
                Some(delay) => format!("{} {}", millis(delay.nanos), delay.by),
                None => String::new(),
            }),
        ])
        .style(style)
    });
    let widths = [24, 7, 8, 8, 8, 9, 9, 9, 9, 9, 8, 7, 33].map(Constraint::Length);
    let names = [
        "client",
        "weight",
        "device",
        "due",
        "waits",
        "P50 ms",
        "P99 ms",
        "longest",
        "calls/s",
        "memory",
        "workers",
        "killed",
        "ms delayed by",
    ];
    let header = Row::new(names).style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_widget(Table::new(table, widths).header(header), body);
    let text = complaint.unwrap_or("q: quit");
    frame.render_widget(Line::from(text.to_owned()), foot);
}

/// Whether a key ends the program.
fn ends(event: &Event) -> bool {
    let Event::Key(key) = event else {
        return false;
    };
    let control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) || control_c
}

/// Shows the clients of the arbiter at `socket` until a key ends it, or nobody reads the output any
/// more.
pub fn run(socket: &Path) -> io::Result<()> {
    let first = status::read(socket)?;
    let mut terminal = match ratatui::try_init() {
        Ok(terminal) => terminal,
        Err(error) => {
            if is_raw_mode_enabled().unwrap_or(false) {
                // There is a terminal, and it has been set up in part.
                let _ = ratatui::try_restore();
            }
            return match error.kind() {
                io::ErrorKind::BrokenPipe => Ok(()),
                _ => Err(no_terminal(&error)),
            };
        }
    };
    let shown = show(&mut terminal, socket, first);
    match shown.and(ratatui::try_restore()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            // Its destructor would show the cursor where nobody reads, and report that this fails.
            mem::forget(terminal);
            Ok(())
        }
        ended => ended,
    }
}

fn no_terminal(error: &io::Error) -> io::Error {
    let text = format!("there is no terminal to draw on ({error}): --metrics prints the figures");
    io::Error::new(io::ErrorKind::Unsupported, text)
}

fn show(terminal: &mut DefaultTerminal, socket: &Path, first: Status) -> io::Result<()> {
    let mut before = first.clone();
    let mut after = first;
    let mut complaint = None;
    loop {
        let rows = figures(&before, &after);
        terminal.draw(|frame| draw(frame, &after, &rows, complaint.as_deref()))?;
        let next = Instant::now() + PERIOD;
        let mut ended = false;
        // Other keys and size changes do not trigger an early sample.
        while let Ok(true) = event::poll(next.saturating_duration_since(Instant::now())) {
            match event::read() {
                Ok(event) if ends(&event) => ended = true,
                Ok(Event::Resize(..)) => {}
                _ => continue,
            }
            break;
        }
        if ended {
            return Ok(());
        }
        match status::read(socket) {
            Ok(now) => {
                before = mem::replace(&mut after, now);
                complaint = None;
            }
            // The arbiter may be restarted.
            Err(error) => complaint = Some(format!("the arbiter does not answer: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::status::Delay;

    fn client(name: &str, weight: u32, device: u64, queueing: u64) -> Client {
        Client {
            name: name.to_owned(),
            weight,
            device_time: device * 1_000_000,
            queueing_time: queueing * 1_000_000,
            ..Client::default()
        }
    }

    fn status(seconds: u64, clients: Vec<Client>) -> Status {
        Status {
            policy: "fair".to_owned(),
            uptime: seconds * 1_000_000_000,
            clients,
        }
    }

    #[test]
    fn shares_are_of_what_was_used_and_due_among_those_who_wanted_it() {
        let before = status(1, vec![client("a", 1, 500, 0), client("idle", 5, 9, 9)]);
        let new = client("b", 3, 600, 300);
        let after = status(
            2,
            vec![client("a", 1, 700, 100), new, client("idle", 5, 9, 9)],
        );
        let rows = figures(&before, &after);
        assert_eq!((rows[0].share, rows[0].due), (0.25, 0.25));
        assert_eq!((rows[1].share, rows[1].due), (0.75, 0.75));
        assert_eq!((rows[2].share, rows[2].due), (0.0, 0.0));
        assert!((rows[1].queueing - 0.3).abs() < 1e-9);
    }

    #[test]
    fn an_arbiter_that_was_started_again_counts_from_nothing() {
        let before = status(100, vec![client("a", 1, 50_000, 0)]);
        let after = status(1, vec![client("a", 1, 400, 0)]);
        assert_eq!(figures(&before, &after)[0].share, 1.0);
    }

    #[test]
    fn the_table_shows_each_client_with_its_share() {
        let mut after = status(
            1,
            vec![client("web", 1, 250, 700), client("hpc", 3, 750, 200)],
        );
        after.clients[0].delay = Some(Delay {
            by: "batch".to_owned(),
            nanos: 60_000_000,
        });
        let rows = figures(&status(0, Vec::new()), &after);
        let mut terminal = Terminal::new(TestBackend::new(170, 6)).unwrap();
        terminal
            .draw(|frame| draw(frame, &after, &rows, None))
            .unwrap();
        let text = terminal.backend().to_string();
        for word in [
            "web",
            "hpc",
            "25.0 %",
            "75.0 %",
            "60.00 batch",
            "policy fair",
            "q: quit",
        ] {
            assert!(text.contains(word), "{word} is missing in {text}");
        }
    }
}
