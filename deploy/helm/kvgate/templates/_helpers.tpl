{{/* The start of all names. A replica's id is its pod's name, at most 48 characters: this, -replica and a number. */}}
{{- define "kvgate.name" -}}
{{ .Release.Name | trunc 36 | trimSuffix "-" }}
{{- end -}}

{{- define "kvgate.secret" -}}
{{ .Values.secret | default (include "kvgate.name" .) }}
{{- end -}}

{{/* What selects the pods of a part: (list "redis" $). */}}
{{- define "kvgate.selector" -}}
app.kubernetes.io/name: {{ first . }}
app.kubernetes.io/instance: {{ (last .).Release.Name }}
{{- end -}}

{{/* Without the chart's version: a new one alone restarts no pod. */}}
{{- define "kvgate.podLabels" -}}
{{ include "kvgate.selector" . }}
app.kubernetes.io/part-of: kvgate
{{- end -}}

{{- define "kvgate.labels" -}}
{{ include "kvgate.podLabels" . }}
app.kubernetes.io/managed-by: {{ (last .).Release.Service }}
helm.sh/chart: kvgate-{{ (last .).Chart.Version }}
{{- end -}}

{{/* The end of a pod: as long as its longest request, and then 30 s for the rest. */}}
{{- define "kvgate.end_s" -}}
{{ add 30 (int .Values.config.timeouts.request_s) }}
{{- end -}}

{{/* A variable from the Secret: (list NAME KEY $); KVGate does without it if there is a fourth element. */}}
{{- define "kvgate.variable" -}}
{{- $key := dict "name" (include "kvgate.secret" (index . 2)) "key" (index . 1) -}}
{{- if gt (len .) 3 }}{{ $_ := set $key "optional" true }}{{ end -}}
- name: {{ index . 0 }}
  valueFrom: { secretKeyRef: {{ toJson $key }} }
{{- end -}}

{{- define "kvgate.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}
