# gnuplot docs/sizing/plot.gp: draws sizing.csv, which `eventhub bench sizing` has written, beside itself.
here = system("dirname ".ARG0)."/"
csv = here."sizing.csv"
set datafile separator comma
set datafile missing NaN
set terminal svg size 760,420 font "sans-serif,13" background "white" noenhanced
set grid
set key outside right top
set style data linespoints
set logscale x
set linetype 1 lc rgb "#1f77b4" lw 2 pt 7 ps 0.6
set linetype 2 lc rgb "#ff7f0e" lw 2 pt 7 ps 0.6
set linetype 3 lc rgb "#2ca02c" lw 2 pt 7 ps 0.6
set linetype 4 lc rgb "#d62728" lw 2 pt 7 ps 0.6
set linetype 5 lc rgb "#9467bd" lw 2 pt 7 ps 0.6

x(study, series) = strcol(1) eq study && strcol(2) eq series ? column(3) : NaN
at(name) = column(name) > 0 ? column(name) : NaN

payloads = "'R1 2m' 'R1 1s' 'R1 always' 'R3 1s' 'R3 always'"
set xlabel "bytes of payload"
set xtics ("64" 64, "256" 256, "1 Ki" 1024, "16 Ki" 16384, "256 Ki" 262144, "1 Mi" 1048576)
set logscale y
do for [op in "pub sub"] {
  set output here.op.".svg"
  set ylabel (op eq "pub" ? "published and confirmed a second" : "delivered and acknowledged a second")
  plot for [d in payloads] csv using (x("payload", op." ".d)):(at("events_per_s")) title d
  set output here.op."-cpu.svg"
  set ylabel "CPU of the servers, µs an event"
  plot for [d in payloads] csv using (x("payload", op." ".d)):(at("server_cpu_us")) title d
}

set xtics auto
set xtics format "%.0f"
set output here."rate.svg"
set xlabel "events a second"
set ylabel "µs"
plot csv using (x("rate", "latency")):(at("server_cpu_us")) title "CPU of the hub an event", \
     csv using (x("rate", "latency")):(1000*at("p50_ms")) title "latency, median", \
     csv using (x("rate", "latency")):(1000*at("p99_ms")) title "latency, p99"

unset logscale y
set yrange [0:*]
set xlabel "connections"
set output here."connections.svg"
set ylabel "resident KiB each"
set xrange [50:20000]
plot for [s in "'idle' 'subscribed' 'group each'"] csv using (x("connections", s)):(at("memory_kib_each")) title s
set xrange [*:*]
set output here."publishers.svg"
set ylabel "published and confirmed a second"
plot csv using (x("connections", "publishers")):(at("events_per_s")) title "hub"

set output here."groups.svg"
set xlabel "groups of one topic"
set ylabel "deliveries a second"
plot for [k in "'durable' 'with TTL'"] csv using (x("groups", "fan-out ".k)):(at("events_per_s")) title k

set output here."topics.svg"
set xlabel "topics"
set ylabel "published and confirmed a second"
plot csv using (x("topics", "pub")):(at("events_per_s")) title "hub"
