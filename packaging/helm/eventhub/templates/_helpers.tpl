{{- define "eventhub.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "eventhub.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "eventhub.labels" -}}
{{ include "eventhub.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* What is wrong with the values is said before anything is installed. */ -}}
{{- define "eventhub.check" -}}
{{- if and .Values.embedded.enabled .Values.nats.url }}{{ fail "embedded.enabled and nats.url contradict each other: set one of them" }}{{ end }}
{{- if not (or .Values.embedded.enabled .Values.nats.url) }}{{ fail "set nats.url to the addresses of your NATS servers, or embedded.enabled" }}{{ end }}
{{- if and .Values.embedded.enabled (ne (int .Values.replicaCount) 1) }}{{ fail "a hub with NATS inside cannot be several: set replicaCount to 1" }}{{ end }}
{{- if not (or .Values.tokens.existingSecret .Values.tokens.jwksURL) }}{{ fail "set tokens.existingSecret to a Secret with the key token, or tokens.jwksURL" }}{{ end }}
{{- if and .Values.tokens.existingSecret (not (or .Values.tokens.token .Values.tokens.jwtSecret)) }}{{ fail "tokens.existingSecret needs tokens.token or tokens.jwtSecret" }}{{ end }}
{{- if and .Values.serviceMonitor.enabled (not .Values.serviceMonitor.tokenSecret) }}{{ fail "serviceMonitor.enabled needs serviceMonitor.tokenSecret, because the metrics need a token" }}{{ end }}
{{- end }}

{{- /* 90 % of an amount of memory such as 1Gi, in the form of GOMEMLIMIT. */ -}}
{{- define "eventhub.memory" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "k" 1000 "M" 1000000 "G" 1000000000 "" 1 -}}
{{- $text := toString . -}}
{{- if not (regexMatch "^[0-9]+(Ki|Mi|Gi|k|M|G)?$" $text) }}{{ fail (printf "resources.limits.memory %q: write a whole number with Ki, Mi, Gi, k, M or G" $text) }}{{ end -}}
{{- $number := regexFind "^[0-9]+" $text | int64 -}}
{{- $unit := get $units (regexReplaceAll "^[0-9]+" $text "") | int64 -}}
{{- div (mul $number $unit 9) 10 -}}
{{- end }}
